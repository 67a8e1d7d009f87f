# SPDX-License-Identifier: Apache-2.0
"""The page /metrics of a real server, its log, and the commands of docs/operating.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import Session, leave, num_running, wait_until_idle
from vllm_choreo.server.metrics import POLL_SECONDS
from vllm_choreo.testing.server import KEYS, MODEL_NAME, Server

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
DASHBOARD = ROOT / "vllm_choreo" / "server" / "dashboard.json"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SHED = "The shed behind the house is green, and its door is red.\n"

Series = tuple[str, frozenset[tuple[str, str]]]


class Page:
    """/metrics at one moment."""

    def __init__(self, client: httpx.Client) -> None:
        self.text = client.get("/metrics").text
        self.series: dict[Series, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        labels = {"model_name": MODEL_NAME, **labels}
        keys = [frozenset(named.items()) for named in (labels, {**labels, "engine": "0"})]
        series = [(f"vllm_choreo:{name}", key) for key in keys]
        (value,) = (self.series[key] for key in series if key in self.series)
        return value

    def ours(self) -> set[Series]:
        return {key for key in self.series if key[0].startswith("vllm_choreo:")}

    def changes(self, before: Page) -> dict[str, float]:
        """By how much our counts have grown: `name{values of labels}` of those that have."""
        counts = [key for key in self.ours() if re.search("_(total|count)$", key[0])]
        grown = {key: self.series[key] - before.series[key] for key in counts}
        return {_short(*key): value for key, value in grown.items() if value}


def _short(name: str, labels: frozenset[tuple[str, str]]) -> str:
    values = [value for label, value in sorted(labels) if label not in ("model_name", "engine")]
    return name.removeprefix("vllm_choreo:") + (f"{{{','.join(values)}}}" if values else "")


@pytest.fixture
def before(alpha: httpx.Client) -> Page:
    return Page(alpha)


@pytest.fixture
def quiet(alpha: httpx.Client) -> Page:
    """The page while nothing happens: what earlier tests left is over, and the engine has told."""
    page = Page(alpha)
    while True:
        time.sleep(POLL_SECONDS + 0.5)  # gauges are as old as that
        last, page = page, Page(alpha)
        if not page.changes(last) and not page.value("num_calls_running"):
            return page


def eventually(alpha: httpx.Client, is_so: Callable[[Page], bool]) -> Page:
    """The first page of which something is true; the engine is asked every few seconds."""
    while not is_so(page := Page(alpha)):
        time.sleep(0.2)
    return page


def choreo(session: Session, **keys: Any) -> dict[str, Any]:
    keys = {"session": session.id, **keys}
    return {"model": MODEL_NAME, "vllm_xargs": {f"choreo_{k}": v for k, v in keys.items()}}


# -- calls -----------------------------------------------------------------------------------------


def test_counters_move_by_the_usage_of_calls(
    quiet: Page, alpha: httpx.Client, session: Session
) -> None:
    """Wherever they come in: one call, a list, a stream, and the stock routes."""
    doc = session.call(type="prefill", content=SHED, save_as="doc")
    moved = session.call(content="It is", parents=["doc"], offsets=[7], sampling_params=GREEDY)
    calls = [
        {"content": "So", "parents": ["doc", moved["id"]], "sampling_params": GREEDY},
        {"type": "prefill", "content": "And", "parents": ["doc"]},
    ]
    both = session.call(calls=calls)["data"]
    streamed = session.events(content="But", parents=["doc"], sampling_params=GREEDY)[-1]
    stock = []
    for path, prompt in (
        ("/v1/completions", {"prompt": "Or"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Or?"}]}),
    ):
        body = {**choreo(session, parents=["doc"]), **prompt, **GREEDY}
        answer = alpha.post(path, json=body)
        assert answer.status_code == 200, answer.text
        stock.append({"type": "decode", "parents": [0], **answer.json()})
    made = [doc, moved, *both, streamed, *stock]
    page = Page(alpha)
    usage = [message["usage"] for message in made]
    sums = {
        name: sum(part[name] for part in usage)
        for name in ("reused_tokens", "repositioned_tokens", "encoded_tokens", "completion_tokens")
    }
    assert all(sums.values())
    num = {kind: sum(m["type"] == kind for m in made) for kind in ("prefill", "decode")}
    assert num == {"prefill": 2, "decode": 5}
    histograms = re.findall(r"`(call_\w+)` \| histogram", DOCUMENT)
    assert len(histograms) == 5
    assert page.changes(quiet) == {
        "reused_tokens_total": sums["reused_tokens"],
        "repositioned_tokens_total": sums["repositioned_tokens"],
        "encoded_tokens_total": sums["encoded_tokens"],
        "generated_tokens_total": sums["completion_tokens"],
        "calls_total{encoded,prefill}": 2,
        "calls_total{length,decode}": 5,
        "sessions_opened_total": 1,
        **{f"{name}_count{{{kind}}}": n for name in histograms for kind, n in num.items()},
    }

    def grown(name: str, kind: str) -> float:
        return page.value(f"{name}_sum", type=kind) - quiet.value(f"{name}_sum", type=kind)

    assert grown("call_num_parents", "decode") == sum(
        len(m["parents"]) for m in made if m["type"] == "decode"
    )
    assert grown("call_reused_ratio", "decode") == pytest.approx(
        sum(
            m["usage"]["reused_tokens"] / m["usage"]["prompt_tokens"]
            for m in made
            if m["type"] == "decode"
        )
    )
    times = [m["metrics"] for m in (moved, both[0], streamed)]
    names = {"waiting": "waiting_time", "ttft": "time_to_first_token", "latency": "latency"}
    for key, name in names.items():
        least = sum(time[key] for time in times)
        assert least < grown(f"call_{name}_seconds", "decode") < least + 20
    assert quiet.value("num_sessions") + 1 == page.value("num_sessions")


def test_a_stock_answer_at_once_has_a_first_token_before_its_end(
    before: Page, alpha: httpx.Client, session: Session
) -> None:
    body = {**choreo(session), "prompt": SHED, **GREEDY, "max_tokens": 40}
    assert alpha.post("/v1/completions", json=body).status_code == 200
    page = Page(alpha)
    first, whole = (
        page.value(f"call_{name}_seconds_sum", type="decode")
        - before.value(f"call_{name}_seconds_sum", type="decode")
        for name in ("time_to_first_token", "latency")
    )
    assert 0 < first < whole / 2


def test_errors_are_counted_once_each(quiet: Page, alpha: httpx.Client, session: Session) -> None:
    # A whole request: refused before any call runs, by our routes and by the stock ones.
    assert session.message("nothing").status_code == 404
    assert session.post({"content": "a", "offsets": [-1]}).status_code == 400
    refused = {**choreo(session, parents=["nothing"]), "prompt": "a", **GREEDY}
    assert alpha.post("/v1/completions", json=refused).status_code == 400
    # A call that only the engine can refuse: its parents fit, but not when padded to whole blocks.
    docs = session.call(calls=[{"type": "prefill", "content": [5 + i] * 33} for i in range(35)])
    parents = [message["id"] for message in docs["data"]]
    middle = Page(alpha)
    assert middle.changes(quiet)["errors_total{OffsetError}"] == 1
    assert middle.changes(quiet)["errors_total{UnknownMessageError}"] == 2
    assert not any(name.startswith("calls_total{error") for name in middle.changes(quiet))
    large = {"content": "a", "parents": parents, "sampling_params": GREEDY}
    assert session.post(large).json()["error"]["type"] == "TooLongError"
    failed = session.call(calls=[{**large, "save_as": "x"}, {"content": "b", "parents": ["x"]}])
    assert [item["error"]["type"] for item in failed["data"]] == [
        "TooLongError",
        "ParentFailedError",
    ]
    assert session.events(**large)[-1]["error"]["type"] == "TooLongError"
    stock = {**choreo(session, parents=parents), "prompt": "a", **GREEDY}
    for stream in (False, True):
        answer = alpha.post("/v1/completions", json={**stock, "stream": stream})
        assert "TooLongError" in answer.text
    assert Page(alpha).changes(middle) == {
        "calls_total{error,decode}": 6,
        "errors_total{TooLongError}": 5,
        "errors_total{ParentFailedError}": 1,
    }


def test_calls_whose_client_went_away(
    before: Page, server: Server, alpha: httpx.Client, session: Session
) -> None:
    long = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
    for path, body in (
        (f"{session.path}/messages", {"content": "a", "sampling_params": long}),
        ("/v1/completions", {**choreo(session), "prompt": "a", **long}),
    ):
        leave(server, path, body, lambda: num_running(alpha) > 0)
        wait_until_idle(alpha)
    name = "calls_total{abandoned,decode}"
    page = eventually(alpha, lambda page: page.changes(before).get(name) == 2)
    assert not any(key.startswith("errors_total") for key in page.changes(before))


# -- the engine and sessions -----------------------------------------------------------------------


def test_the_engine_tells_what_it_holds(quiet: Page, alpha: httpx.Client, session: Session) -> None:
    texts = [f"Message {i}. {SHED}" for i in range(3)]
    made = [
        session.call(type="prefill", content=text, save_as=f"m{text[8]}", keep_hidden=[1])
        for text in texts
    ]
    num_tokens = sum(message["num_tokens"] for message in made)
    before = quiet.value("num_messages")
    page = eventually(alpha, lambda page: page.value("num_messages") >= before + 3)
    for name, more in {
        "num_messages": 3,
        "num_resident_messages": 3,
        "num_tokens": num_tokens,
        "num_resident_tokens": num_tokens,
    }.items():
        assert page.value(name) - quiet.value(name) == more
    assert 0 < page.value("kv_cache_usage_perc") < 1 and page.value("host_memory_usage_perc") == 0
    assert 0 < page.value("hidden_memory_usage_perc") < 1
    more = [
        page.value("message_memory_bytes", kind=kind)
        - quiet.value("message_memory_bytes", kind=kind)
        for kind in ("full", "window", "state")
    ]
    assert more[0] > num_tokens and more[1:] == [0, 0]
    assert page.value("states_usage_perc") == page.value("host_memory_bytes", kind="state") == 0

    assert alpha.post(f"{session.path}/messages/m0/pin").status_code == 200
    assert alpha.post(f"{session.path}/messages/m1/evict").status_code == 200
    evicted = eventually(
        alpha,
        lambda now: now.value("num_pinned_messages") == quiet.value("num_pinned_messages") + 1,
    )
    assert evicted.value("num_resident_messages") == page.value("num_resident_messages") - 1
    assert evicted.changes(page) == {
        "evicted_messages_total": 1,
        "evicted_tokens_total": made[1]["num_tokens"],
    }
    session.call(content="So", parents=["m1"], sampling_params=GREEDY)
    again = eventually(alpha, lambda page: "encoded_again_tokens_total" in page.changes(evicted))
    assert again.changes(evicted)["encoded_again_messages_total"] == 1
    assert again.changes(evicted)["encoded_again_tokens_total"] == made[1]["num_tokens"]


def test_sessions_end_by_request_or_unused(quiet: Page, alpha: httpx.Client) -> None:
    alpha.delete(Session(alpha).path)
    Session(alpha, ttl_seconds=0.5)
    page = eventually(alpha, lambda page: "sessions_expired_total" in page.changes(quiet))
    assert page.changes(quiet) == {
        "sessions_opened_total": 2,
        "sessions_closed_total": 1,
        "sessions_expired_total": 1,
    }
    assert page.value("num_sessions") == quiet.value("num_sessions")


def test_labels_hold_no_ids_and_series_do_not_grow(
    before: Page, alpha: httpx.Client, beta: httpx.Client
) -> None:
    sessions = [Session(client) for client in (alpha, beta) for _ in range(4)]
    made = [s.call(type="prefill", content=SHED, save_as=f"secret-name-{s.id}") for s in sessions]
    page = Page(alpha)
    assert page.ours() == before.ours()
    for text in ("secret-name", *KEYS, *(s.id for s in sessions), *(m["id"] for m in made)):
        assert text not in page.text
    labels = {label for _, pairs in page.ours() for label, _ in pairs}
    expected = {"model_name", "type", "outcome", "error_type", "reason", "le", "engine", "kind"}
    assert labels == expected
    for s in sessions:
        s.client.delete(s.path)


def test_the_dashboard_asks_for_what_is_there(before: Page) -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [t["expr"] for panel in panels for t in panel.get("targets", ())]
    names = {name for text in expressions for name in re.findall(r"([a-z_]+:?[a-z_]+)\{", text)}
    there = {name for name, _ in before.series}
    assert len(expressions) > 40 and names <= there
    for text in expressions:
        label_names = set(re.findall(r"(\w+)=~?\"", text)) - {"instance"}  # Prometheus adds it
        for name in re.findall(r"([a-z_]+:?[a-z_]+)\{", text):
            labels = {label for key, pairs in before.series if key == name for label, _ in pairs}
            assert label_names <= labels, text


# -- the log ---------------------------------------------------------------------------------------


def events(server: Server, session: str) -> list[dict[str, Any]]:
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"event":"choreo.' in line]
    return [event for event in found if event["session"] == session]


def documented_fields(event: str) -> set[str]:
    (row,) = re.findall(rf"^\| `{re.escape(event)}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def test_each_call_is_one_line_of_the_log(server: Server, alpha: httpx.Client) -> None:
    session = Session(alpha)
    doc = session.call(type="prefill", content="A conspicuous text.", save_as="doc")
    answer = session.call(content="So", parents=["doc"], sampling_params=GREEDY)
    body = {**choreo(session, parents=["doc"]), "prompt": "Or", **GREEDY}
    stock = alpha.post("/v1/completions", json=body).json()
    docs = session.call(calls=[{"type": "prefill", "content": [5 + i] * 33} for i in range(35)])
    large = {"content": "a", "parents": [message["id"] for message in docs["data"]]}
    assert session.post(large).status_code == 400
    alpha.delete(session.path)
    lines = events(server, session.id)
    assert len(lines) == 3 + 35 + 1
    for line, message in zip(lines[:2], (doc, answer), strict=True):
        assert line["message"] == message["id"] and line["type"] == message["type"]
        assert line["usage"] == message["usage"] and line["num_tokens"] == message["num_tokens"]
        assert line["metrics"] == {k: round(v, 4) for k, v in message["metrics"].items()}
    assert lines[2]["message"] == stock["choreo"]["id"]
    assert lines[2]["usage"]["encoded_tokens"] == stock["usage"]["encoded_tokens"]
    assert lines[-1]["error"] == "TooLongError" and lines[-1]["param"] == "parents"
    keys = {key for line in lines for key in (*line, *line.get("metrics", ()))} - {"event"}
    assert keys == documented_fields("choreo.call") - {"abandoned"}
    log = server.log.read_text(errors="replace")
    assert "conspicuous" not in log and not any(f"Bearer {key}" in log for key in KEYS)


# -- the page for operators ------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
def test_documented_commands_run(server: Server, tmp_path: Path) -> None:
    script, local = "".join(blocks("bash")), "BASE=http://localhost:8000 KEY=your-key\n"
    assert script.startswith(local)
    script = script.replace(local, f"BASE={server.base_url} KEY={KEYS[0]}\n")
    script = script.replace("vllm-choreo ", f"{Path(sys.executable).with_name('vllm-choreo')} ")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert '"object":"choreo.session"' in done.stdout and '"deleted":true' in done.stdout
    assert "vllm_choreo:num_sessions" in done.stdout
    assert (tmp_path / "vllm-choreo.json").read_bytes() == DASHBOARD.read_bytes()
