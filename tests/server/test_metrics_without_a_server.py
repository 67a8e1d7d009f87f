# SPDX-License-Identifier: Apache-2.0
"""Metrics without a server: what is counted, the questions to the engine, the dashboard's file, and
the tables of docs/operating.md.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.buckets import TIME_TO_FIRST_TOKEN_BUCKETS

from vllm_choreo import errors
from vllm_choreo.cli import main as cli
from vllm_choreo.config import ChoreoConfig, ServerConfig
from vllm_choreo.errors import ChoreoError, LimitError, UnknownMessageError
from vllm_choreo.repair.pair import Cell
from vllm_choreo.repair.pair_rule import REASONS, ChosenCell
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.server import metrics
from vllm_choreo.server.errors import status_of
from vllm_choreo.server.metrics import CallMetrics, EngineMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
TOTALS = {
    "num_messages": 5,
    "num_tokens": 120,
    "num_resident": 3,
    "num_resident_tokens": 90,
    "num_pinned": 1,
    "num_sessions": 2,
    "num_blocks": 4,
    "num_window_blocks": 3,
    "num_free_blocks": 11,
    "num_pool_blocks": 16,
    "block_bytes": 1000,
    "num_host_blocks": 8,
    "num_host_blocks_used": 2,
    "num_states": 6,
    "num_states_used": 3,
    "num_message_states": 2,
    "state_bytes": 70,
    "num_host_states": 5,
    "num_host_states_used": 4,
    "num_hidden_bytes": 50,
    "max_hidden_bytes": 200,
    "num_picture_bytes": 30,
    "max_picture_bytes": 100,
    "num_calls": 7,
    "num_calls_waiting": 3,
}


class Measured:
    """A registry with our metrics in it."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        add = partial(metrics._add, self.registry, "m")
        self.calls = CallMetrics(add, **options)
        self.engine = EngineMetrics(add)

    def value(self, name: str, **labels: str) -> float:
        found = (
            self.registry.get_sample_value(f"vllm_choreo:{name}", {"model_name": "m", **named})
            for named in (labels, {"engine": "0", **labels})
        )
        value = next((value for value in found if value is not None), None)
        assert value is not None, name
        return value

    def series(self) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return {(sample.name, frozenset(sample.labels.items())) for sample in samples}


@pytest.fixture
def measured() -> Measured:
    return Measured()


def a_message(
    usage: Usage, num_generated: int = 0, num_parents: int = 0, waiting: float | None = 0.25
) -> Message:
    return Message(
        id="s/m",
        text="",
        token_ids=(),
        num_tokens=0,
        position=0,
        parents=(ParentSpan("s/p"),) * num_parents,
        generated_text="",
        generated_token_ids=(7,) * num_generated,
        logprobs=None,
        finish_reason="length" if num_generated else None,
        usage=usage,
        metrics=Metrics(submitted=0.0, waiting=waiting, ttft=0.5, latency=2.0),
    )


# -- calls -----------------------------------------------------------------------------------------


def test_a_call_is_counted_by_its_usage_and_times(measured: Measured) -> None:
    # Read: 60 + 20 tokens; 5 more were generated.
    usage = Usage(exact=False, reused_tokens=60, repositioned_tokens=40, encoded_tokens=25)
    measured.calls.finished("decode", a_message(usage, num_generated=5, num_parents=3))
    tokens = {"reused": 60, "repositioned": 40, "encoded": 25, "generated": 5}
    for name, count in tokens.items():
        assert measured.value(f"{name}_tokens_total") == count
    assert measured.value("calls_total", type="decode", outcome="length") == 1
    sums = {
        "call_waiting_time_seconds": 0.25,
        "call_time_to_first_token_seconds": 0.5,
        "call_latency_seconds": 2.0,
        "call_reused_ratio": 0.75,
        "call_num_parents": 3,
    }
    for name, total in sums.items():
        assert measured.value(f"{name}_sum", type="decode") == total
        assert measured.value(f"{name}_count", type="decode") == 1
        assert measured.value(f"{name}_count", type="prefill") == 0


def test_what_is_not_known_is_not_measured(measured: Measured) -> None:
    """A prefill in baseline mode runs nothing and reads nothing."""
    measured.calls.finished("prefill", a_message(Usage(True, 0, 0, 0), waiting=None))
    assert measured.value("calls_total", type="prefill", outcome="encoded") == 1
    assert measured.value("call_waiting_time_seconds_count", type="prefill") == 0
    assert measured.value("call_reused_ratio_count", type="prefill") == 0
    assert measured.value("call_latency_seconds_count", type="prefill") == 1


def test_no_event_makes_a_new_series(measured: Measured) -> None:
    before = measured.series()
    for kind in ("prefill", "decode"):
        for outcome in ("error", "abandoned"):
            measured.calls.failed(kind, outcome)
    measured.calls.finished("prefill", a_message(Usage(True, 0, 0, 9)))
    measured.calls.finished("decode", a_message(Usage(True, 0, 0, 9), num_generated=2))
    for error in (ChoreoError("a"), LimitError("b"), UnknownMessageError("c")):
        measured.calls.refused(error)
    measured.calls.opened()
    for reason in REASONS:
        measured.calls.chosen(ChosenCell(Cell(((0, 2),), 0.0, 0.0, 0.0, 0.0), reason))
    measured.engine._show({0: {**TOTALS, "evicted_messages_total": 4}})
    assert measured.series() == before
    assert measured.value("errors_total", error_type="LimitError") == 1
    # Seconds since 1970, at which each series was made, are no series of their own in a graph.
    names = {name for name, _ in before if not name.endswith("_created")}
    assert {label for _, labels in before for label, _ in labels} == {
        "model_name", "type", "outcome", "error_type", "reason", "le", "engine", "kind",
    }  # fmt: skip
    assert len(names) <= 65 and len(before) < 400


def test_sessions(measured: Measured) -> None:
    for _ in range(3):
        measured.calls.opened()
    measured.calls.closed(expired=True)
    measured.calls.closed(expired=False)
    assert measured.value("num_sessions") == 1
    names = ("opened", "closed", "expired")
    assert [measured.value(f"sessions_{name}_total") for name in names] == [3, 1, 1]


def test_buckets_are_those_of_vllm_or_the_operators_own() -> None:
    def bounds(measured: Measured, name: str) -> list[float]:
        series = measured.series()
        found = [dict(labels)["le"] for n, labels in series if n == f"vllm_choreo:{name}_bucket"]
        return sorted({float(bound) for bound in found})

    name = "call_time_to_first_token_seconds"
    assert bounds(Measured(), name) == [*TIME_TO_FIRST_TOKEN_BUCKETS, math.inf]
    own = Measured(overrides={"time_to_first_token": [0.5, 3.0]})
    assert bounds(own, name) == [0.5, 3.0, math.inf]


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "_MESSAGES_PER_SECOND", math.inf)


def poll(measured: Measured, *answers: Any) -> None:
    """Ask for the totals until the engine has ended, which follows the last of `answers`.

    An answer that is called looks at what was shown before it.
    """
    queue: Iterator[Any] = iter([*answers, EngineDeadError()])
    num_asked = 0

    async def totals() -> Any:
        nonlocal num_asked
        num_asked += 1
        assert num_asked == 1, "the engine is asked again before it has answered"
        await asyncio.sleep(0)
        num_asked -= 1
        answer = next(queue)
        if isinstance(answer, Exception):
            raise answer
        return {0: answer() if callable(answer) else answer}

    asyncio.run(asyncio.wait_for(measured.engine.poll(totals), 10))


@pytest.mark.usefixtures("at_once")
def test_gauges_are_what_the_engine_said_last(measured: Measured) -> None:
    seen = {}

    def look() -> Any:
        names = [name for name, _ in measured.series() if name.startswith("vllm_choreo:num_")]
        seen.update({name[12:]: measured.value(name[12:]) for name in names})
        seen["kv"] = measured.value("kv_cache_usage_perc")
        seen["windows"] = measured.value("window_blocks_usage_perc")
        seen["host"] = measured.value("host_memory_usage_perc")
        seen["states"] = measured.value("states_usage_perc")
        return TOTALS

    poll(measured, {**TOTALS, "num_messages": 99}, TOTALS, look)
    assert seen == {
        "num_messages": 5,
        "num_tokens": 120,
        "num_resident_messages": 3,
        "num_resident_tokens": 90,
        "num_pinned_messages": 1,
        "num_calls_waiting": 3,
        "num_calls_running": 4,
        "num_sessions": 0,  # those that are open, counted here
        "kv": 0.25,
        "windows": 3 / 16,
        "host": 0.25,
        "states": 0.5,
    }


@pytest.mark.usefixtures("at_once")
def test_memory_is_shown_by_the_kind_of_what_lies_there(measured: Measured) -> None:
    """In bytes: of 4 blocks 3 are of windows; states of running requests are no message's."""
    seen: dict[tuple[str, str], float] = {}

    def look() -> Any:
        for name, (_, kinds) in metrics._MEMORY.items():
            seen.update({(name, kind): measured.value(name, kind=kind) for kind in kinds})
        return TOTALS

    poll(measured, TOTALS, look)
    assert seen == {
        ("message_memory_bytes", "full"): 1000,
        ("message_memory_bytes", "window"): 3000,
        ("message_memory_bytes", "state"): 140,
        ("host_memory_bytes", "blocks"): 2000,
        ("host_memory_bytes", "state"): 280,
    }


@pytest.mark.usefixtures("at_once")
def test_totals_become_counters(measured: Measured) -> None:
    """The engine leaves out what has not happened."""
    later = {"evicted_messages_total": 2, "evicted_tokens_total": 64}
    poll(measured, TOTALS, {**TOTALS, **later}, {**TOTALS, **later, "evicted_tokens_total": 70})
    assert measured.value("evicted_messages_total") == 2
    assert measured.value("evicted_tokens_total") == 70
    assert measured.value("restored_tokens_total") == 0


def test_each_engine_has_series_of_its_own_and_counts_from_0_when_it_starts_again() -> None:
    registry = CollectorRegistry()
    engines = EngineMetrics(partial(metrics._add, registry, "m"), num_engines=2)

    def values(name: str) -> list[float]:
        labels = [{"model_name": "m", "engine": engine} for engine in ("0", "1")]
        found = [registry.get_sample_value(f"vllm_choreo:{name}", named) for named in labels]
        return [value for value in found if value is not None]

    counted = {**TOTALS, "evicted_messages_total": 5, "moved_bytes_total": 640}
    engines._show({0: TOTALS, 1: counted})
    assert values("num_messages") == [5, 5] and values("evicted_messages_total") == [0, 5]
    engines._show({0: TOTALS})
    assert values("num_messages")[0] == 5 and math.isnan(values("num_messages")[1])
    engines._show({0: TOTALS, 1: {**counted, "evicted_messages_total": 2}})
    assert values("evicted_messages_total") == [0, 7] and values("moved_bytes_total") == [0, 640]


@pytest.mark.usefixtures("at_once")
def test_the_poll_survives_errors_and_tells_of_them_once(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: warnings.append(text % args))
    seen: list[float] = []

    def look(answer: Any) -> Callable[[], Any]:
        def looked() -> Any:
            seen.append(measured.value("num_messages"))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return looked

    failure = RuntimeError("busy")
    counted = {**TOTALS, "evicted_messages_total": 3}
    poll(measured, counted, look(failure), look(failure), look(counted), look(failure), TOTALS)
    assert seen[0] == 5 and math.isnan(seen[1]) and math.isnan(seen[2]) and seen[3] == 5
    # One for each time that it fell silent; that it has ended, vLLM tells.
    assert [w.count("busy") for w in warnings] == [1, 1]
    assert math.isnan(measured.value("num_messages"))


def test_a_full_engine_is_asked_rarely(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    many = {**TOTALS, "num_messages": 50_000}
    answers = iter([TOTALS, many, EngineDeadError()])

    async def totals() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return {0: answer}

    monkeypatch.setattr(metrics.asyncio, "sleep", sleep)
    asyncio.run(measured.engine.poll(totals))
    assert pauses == [metrics.POLL_SECONDS, 50.0]


# -- the dashboard ---------------------------------------------------------------------------------


@pytest.fixture
def dashboard(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["dashboard"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_dashboard_has_its_rows_and_variables(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Reuse", "Memory", "Latency", "Errors", "Engines"]
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert dashboard["schemaVersion"] >= 41 and dashboard["uid"] and "id" not in dashboard


def test_every_panel_says_what_it_shows(dashboard: dict[str, Any]) -> None:
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"] and len({t["refId"] for t in panel["targets"]}) == len(
            panel["targets"]
        )
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            selectors = re.findall(r"\{(.*?)\}", target["expr"])
            assert selectors and all('instance=~"$instance"' in s for s in selectors)
            assert all('model_name="$model_name"' in s for s in selectors if "handler" not in s), (
                target["expr"]
            )
            # Each line of a graph has a name: of its own, or by the labels that it is grouped by.
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.match(r"sum by \(([\w, ]+)\)", target["expr"])
            assert target["legendFormat"]
            assert not grouped or shown == set(grouped[1].split(", "))
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_fill_the_width_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in dashboard["panels"]):
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        cells |= own
    height = 1 + max(y for _, y in cells)
    assert cells == {(x, y) for x in range(24) for y in range(height)}


def test_dashboard_shows_every_metric_that_exists_and_no_other(
    dashboard: dict[str, Any], measured: Measured
) -> None:
    expressions = " ".join(t["expr"] for p in dashboard["panels"] for t in p.get("targets", ()))
    asked = set(re.findall(r"vllm_choreo:(\w+)", expressions))
    there = {name.removeprefix("vllm_choreo:") for name, _ in measured.series()}
    assert asked <= there
    assert {re.sub("_bucket$", "", name) for name in asked} == documented_metrics()


# -- the page for operators ------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the page, without its head."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def documented_metrics() -> set[str]:
    return {row[0].strip("`") for row in table("Metrics")}


def test_documented_settings_are_all_settings() -> None:
    documented = [(name.strip("`"), default.strip("`")) for name, default, _ in table("Settings")]
    settings = [(f.name, f.default) for f in fields(ChoreoConfig) if f.name != "server"]
    settings += [(f"server.{f.name}", f.default) for f in fields(ServerConfig)]
    assert documented == [(name, json.dumps(default)) for name, default in settings]


def test_documented_errors_are_all_errors_of_a_server() -> None:
    at_start = {"UnsupportedModelError", "UnsupportedVersionError"}
    documented = {name.strip("`"): int(status) for name, status, _ in table("Limits and errors")}
    assert set(documented) == set(metrics._ERROR_TYPES) - at_start
    for name, status in documented.items():
        assert status == status_of(getattr(errors, name)("")), name


def test_documented_metrics_are_all_metrics(measured: Measured) -> None:
    families = {family.name: family for family in measured.registry.collect()}
    for name, kind, labels, _ in table("Metrics"):
        name = name.strip("`")
        family = families.pop(f"vllm_choreo:{name.removesuffix('_total')}")
        assert kind == family.type, name
        given = set(family.samples[0].labels) - {"model_name", "le"}
        assert set(re.findall(r"`(\w+)`", labels)) == given, name
        assert name.endswith("_total") == (kind == "counter"), name
    assert not {name for name in families if not name.endswith("_created")}


def test_choices_of_layers_are_counted_by_their_reasons(measured: Measured) -> None:
    cells = [Cell(layers, 0.0, 0.0, 0.0, 0.0) for layers in ((), ((0, 2), (5, 8)))]
    for cell, reason in ((cells[0], "late"), (cells[1], "best"), (cells[1], "best")):
        measured.calls.chosen(ChosenCell(cell, reason))
    for reason, calls, layers in (("late", 1, 0), ("best", 2, 10), ("load", 0, 0)):
        assert measured.value("pair_calls_total", reason=reason) == calls
        assert measured.value("pair_layers_total", reason=reason) == layers
    (row,) = (row for row in table("Metrics") if row[0] == "`pair_calls_total`")
    assert set(re.findall(r"`(\w+)`", row[3])) == set(REASONS)


def test_documented_outcomes_are_all_outcomes() -> None:
    (row,) = (row for row in table("Metrics") if row[0] == "`calls_total`")
    words = set(re.findall(r"`(\w+)`", row[3])) - {"prefill", "decode"}
    assert words == {outcome for outcomes in metrics._OUTCOMES.values() for outcome in outcomes}


def test_the_size_of_a_token_is_computed_right(embedded_model_path: Path) -> None:
    config = json.loads((embedded_model_path / "config.json").read_text(encoding="utf-8"))
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    head_size = config["hidden_size"] // config["num_attention_heads"]
    num_bytes = 2 * layers * heads * head_size * 4
    assert f"2 · {layers} · {heads} · {head_size} · 4 = {num_bytes:,} bytes" in PAGE
    assert f"1 GiB holds {2**30 // num_bytes // 100 * 100:,} tokens" in PAGE
