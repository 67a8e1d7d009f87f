# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics on vLLM's page /metrics: how calls end, and what the engine holds.

Calls, sessions and errors are counted as they happen (`CallMetrics`); the engine is asked for its
numbers every few seconds (`EngineMetrics`). Labels have few values, all of them known at the start:
none is the id of a session, a tenant or a message. docs/operating.md lists every metric.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.buckets import histogram_buckets

from vllm_choreo import errors
from vllm_choreo.api.fleet import totals_by_engine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.pair_rule import REASONS, ChosenCell
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.auto_messages import AUTO_OUTCOMES
from vllm_choreo.server.sessions import Sessions

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.choreo.server")

POLL_SECONDS = 2.0
# Counting takes the engine about 5 µs a message (measured with 1,000 to 100,000 messages), during
# which it does nothing else: it is asked more rarely if there are many, for at most 0.5 % of it.
_MESSAGES_PER_SECOND = 1_000

_Totals = Mapping[str, int]

# How calls end, by their type.
_OUTCOMES = {
    "prefill": ("encoded", "error", "abandoned"),
    "decode": ("stop", "length", "repetition", "error", "abandoned"),
}
_ERROR_TYPES = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ChoreoError)
]
_SESSIONS = {
    "opened": "Sessions that were opened.",
    "closed": "Sessions that were closed by request.",
    "expired": "Sessions that were closed because nobody used them.",
}
_TOKENS = {
    "reused": "Tokens that calls read from the cache.",
    "repositioned": "Reused tokens that were read at another position than they were encoded at.",
    "encoded": "Tokens that were computed for calls, generated ones included.",
    "repaired": "Tokens of parents that were read as encoded in the call's own context (repair).",
    "generated": "Tokens that calls generated.",
}
_AUTO = {
    "found_messages": "Parts of chats that were found among the tenant's messages.",
    "new_messages": "Parts of chats that became messages.",
    "found_tokens": "Tokens of parts that were found.",
    "new_tokens": "Tokens of parts that became messages.",
}
# Of each call: what is measured, and upper bounds of buckets or vLLM's name for them.
_HISTOGRAMS: dict[str, tuple[str, Any]] = {
    "call_waiting_time_seconds": (
        "From a call's submission until the engine first scheduled it.",
        "time_to_first_token",
    ),
    "call_time_to_first_token_seconds": (
        "From a call's submission to its first token; of a prefill, until it was encoded.",
        "time_to_first_token",
    ),
    "call_latency_seconds": ("From a call's submission to its end.", "request_latency"),
    "call_reused_ratio": (
        "Part of what a call read that came from the cache. 1 means 100 percent.",
        [tenths / 10 for tenths in range(11)],
    ),
    "call_num_parents": (
        "Parents that a call listed.",
        [0, 1, 2, 3, 5, 8, 12, 20, 50, 100, 200, 500, 1000],
    ),
}

# Of the engine's totals.
_GAUGES: dict[str, tuple[str, Callable[[_Totals], float]]] = {
    "num_messages": (
        "Messages that are not freed, and copies made for exact calls.",
        lambda totals: totals["num_messages"],
    ),
    "num_tokens": ("Tokens of these messages.", lambda totals: totals["num_tokens"]),
    "num_resident_messages": (
        "Messages that are in the KV cache as a whole.",
        lambda totals: totals["num_resident"],
    ),
    "num_resident_tokens": (
        "Tokens of messages that are in the KV cache.",
        lambda totals: totals["num_resident_tokens"],
    ),
    "num_pinned_messages": (
        "Messages that are evicted after all others.",
        lambda totals: totals["num_pinned"],
    ),
    "kv_cache_usage_perc": (
        "Part of the KV cache that holds messages. 1 means 100 percent.",
        lambda totals: totals["num_blocks"] / totals["num_pool_blocks"],
    ),
    "window_blocks_usage_perc": (
        "Part of the KV cache that holds messages for layers with sliding windows, where these "
        "have blocks of their own. 1 means 100 percent.",
        lambda totals: totals["num_window_blocks"] / totals["num_pool_blocks"],
    ),
    "states_usage_perc": (
        "Part of the states of models that have them that messages and running requests hold. "
        "1 means 100 percent.",
        lambda totals: totals["num_states_used"] / max(1, totals["num_states"]),
    ),
    "host_memory_usage_perc": (
        "Part of the host memory for evicted messages that is in use. 1 means 100 percent.",
        lambda totals: totals["num_host_blocks_used"] / max(1, totals["num_host_blocks"]),
    ),
    "hidden_memory_usage_perc": (
        "Part of the memory for hidden states that is in use. 1 means 100 percent.",
        lambda totals: totals["num_hidden_bytes"] / max(1, totals["max_hidden_bytes"]),
    ),
    "picture_memory_usage_perc": (
        "Part of the memory for pictures of messages that is in use. 1 means 100 percent.",
        lambda totals: totals["num_picture_bytes"] / max(1, totals["max_picture_bytes"]),
    ),
    "num_calls_waiting": (
        "Calls that wait until their parents are complete, or in the KV cache again.",
        lambda totals: totals["num_calls_waiting"],
    ),
    "num_calls_running": (
        "Calls that run or may start as soon as there is room, encodings again included.",
        lambda totals: totals["num_calls"] - totals["num_calls_waiting"],
    ),
}
# Likewise, by the kind of what lies there.
_MEMORY: dict[str, tuple[str, dict[str, Callable[[_Totals], float]]]] = {
    "message_memory_bytes": (
        "Bytes that messages hold in the memory of one worker: blocks of full attention (or of all "
        "layers, where windows have no blocks of their own), of sliding windows, and states.",
        {
            "full": lambda totals: (
                (totals["num_blocks"] - totals["num_window_blocks"]) * totals["block_bytes"]
            ),
            "window": lambda totals: totals["num_window_blocks"] * totals["block_bytes"],
            "state": lambda totals: totals["num_message_states"] * totals["state_bytes"],
        },
    ),
    "host_memory_bytes": (
        "Bytes that evicted messages hold in the host memory of one worker.",
        {
            "blocks": lambda totals: totals["num_host_blocks_used"] * totals["block_bytes"],
            "state": lambda totals: totals["num_host_states_used"] * totals["state_bytes"],
        },
    ),
}
_COUNTERS = {
    "evicted_messages": "Messages that made room in the KV cache.",
    "evicted_tokens": "Tokens of messages that made room in the KV cache.",
    "encoded_again_messages": "Messages that were encoded again after they had been evicted.",
    "encoded_again_tokens": "Tokens that were encoded again after they had been evicted.",
    "drafted_tokens": "Tokens that speculative decoding proposed for calls.",
    "accepted_draft_tokens": "Those of them that the model would have sampled.",
    "scored_tokens": "Tokens of calls that were run to choose what is repaired for them.",
    "restored_messages": "Messages that came back from host memory.",
    "restored_tokens": "Tokens that came back from host memory.",
    "moved_messages": "Messages whose keys and values came from another engine.",
    "moved_tokens": "Tokens of these messages.",
    "moved_bytes": "Bytes of their keys and values.",
    "failed_moves": "Moves that failed: the messages were encoded.",
    "remade_messages": "Messages that were encoded though another engine had encoded them.",
    "remade_tokens": "Tokens of these messages.",
    "engine_restarts": "Starts of the engine after it had ended.",
}

# `_add` for a registry and a model.
_Adder = Callable[..., Callable[..., Any]]


def start(sessions: Sessions, async_llm: AsyncLLM) -> None:
    """Measure from now on, in the running event loop.

    Args:
        sessions: open sessions of the server.
        async_llm: its engine client.
    """
    overrides = async_llm.vllm_config.observability_config.custom_histogram_buckets
    add = partial(_add, REGISTRY, sessions.model)
    sessions.observers.append(CallMetrics(add, overrides))
    num_engines = async_llm.vllm_config.parallel_config.data_parallel_size
    totals = partial(totals_by_engine, async_llm)
    sessions.in_background(EngineMetrics(add, num_engines).poll(totals))


class CallMetrics:
    """Metrics of calls and sessions: an `Observer` of `Sessions`.

    Args:
        add: `_add` for a registry and a model.
        overrides: the operator's own buckets (`--custom-histogram-buckets`), by vLLM's names.
    """

    def __init__(self, add: _Adder, overrides: Mapping[str, list[float]] | None = None) -> None:
        self._num_sessions = add(
            Gauge, "num_sessions", "Sessions that are open.", multiprocess_mode="livesum"
        )()
        self._sessions = {
            name: add(Counter, f"sessions_{name}", text)() for name, text in _SESSIONS.items()
        }
        self._tokens = {
            name: add(Counter, f"{name}_tokens", text)() for name, text in _TOKENS.items()
        }
        self._calls = add(Counter, "calls", "Calls that are over.", ["type", "outcome"])
        self._errors = add(
            Counter,
            "errors",
            "Errors with which clients were answered.",
            ["error_type"],
        )
        self._chats = add(Counter, "auto_chats", "Chats that name no messages.", ["outcome"])
        self._auto = {name: add(Counter, f"auto_{name}", text)() for name, text in _AUTO.items()}
        self._pair_calls = add(
            Counter,
            "pair_calls",
            "Calls whose layers the profile of a pair has chosen.",
            ["reason"],
        )
        self._pair_layers = add(
            Counter, "pair_layers", "Layers that such calls encode anew.", ["reason"]
        )
        self._histograms = {
            name: add(Histogram, name, text, ["type"], buckets=_bounds(buckets, overrides))
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._show_all()

    def _show_all(self) -> None:
        """Make every series, so that its first event is seen as one more than none."""
        for name in _ERROR_TYPES:
            self._errors(name)
        for outcome in AUTO_OUTCOMES:
            self._chats(outcome)
        for reason in REASONS:
            self._pair_calls(reason)
            self._pair_layers(reason)
        for kind, outcomes in _OUTCOMES.items():
            for outcome in outcomes:
                self._calls(kind, outcome)
            for series in self._histograms.values():
                series(kind)

    def opened(self) -> None:
        self._sessions["opened"].inc()
        self._num_sessions.inc()

    def closed(self, *, expired: bool) -> None:
        self._sessions["expired" if expired else "closed"].inc()
        self._num_sessions.dec()

    def finished(self, kind: str, message: Message) -> None:
        usage, times = message.usage, message.metrics
        num_generated = len(message.generated_token_ids)
        num_read = usage.reused_tokens + usage.encoded_tokens - num_generated
        self._calls(kind, message.finish_reason or "encoded").inc()
        self._tokens["reused"].inc(usage.reused_tokens)
        self._tokens["repositioned"].inc(usage.repositioned_tokens)
        self._tokens["encoded"].inc(usage.encoded_tokens)
        self._tokens["repaired"].inc(usage.repaired_tokens)
        self._tokens["generated"].inc(num_generated)
        measured = {
            "call_waiting_time_seconds": times.waiting,
            "call_time_to_first_token_seconds": times.ttft,
            "call_latency_seconds": times.latency,
            # A prefill in baseline mode reads nothing.
            "call_reused_ratio": usage.reused_tokens / num_read if num_read else None,
            "call_num_parents": len(message.parents),
        }
        for name, value in measured.items():
            if value is not None:
                self._histograms[name](kind).observe(value)

    def failed(self, kind: str, outcome: str) -> None:
        self._calls(kind, outcome).inc()

    def refused(self, error: ChoreoError) -> None:
        self._errors(type(error).__name__).inc()

    def chosen(self, choice: ChosenCell) -> None:
        self._pair_calls(choice.reason).inc()
        self._pair_layers(choice.reason).inc(choice.cell.num_layers)

    def looked_up(self, outcome: str, report: Mapping[str, int]) -> None:
        self._chats(outcome).inc()
        if report:
            self._auto["found_messages"].inc(report["found"])
            self._auto["new_messages"].inc(report["parts"] - report["found"])
            self._auto["found_tokens"].inc(report["found_tokens"])
            self._auto["new_tokens"].inc(report["new_tokens"])


class EngineMetrics:
    """Metrics of what the engines hold, and of what they did on their own.

    Args:
        add: `_add` for a registry and a model.
        num_engines: number of engines, each with series of its own.
    """

    def __init__(self, add: _Adder, num_engines: int = 1) -> None:
        gauge = partial(add, Gauge, multiprocess_mode="mostrecent")
        gauges: list[tuple[Callable[..., Any], tuple[str, ...], Callable[[_Totals], float]]] = [
            (gauge(name, text, ["engine"]), (), value) for name, (text, value) in _GAUGES.items()
        ]
        for name, (text, by_kind) in _MEMORY.items():
            series = gauge(name, text, ["engine", "kind"])
            gauges += [(series, (kind,), value) for kind, value in by_kind.items()]
        counters = {name: add(Counter, name, text, ["engine"]) for name, text in _COUNTERS.items()}
        engines = range(num_engines)
        self._gauges = [
            [(of(str(e), *labels), value) for of, labels, value in gauges] for e in engines
        ]
        self._counters = [{name: of(str(e)) for name, of in counters.items()} for e in engines]
        self._last: list[_Totals] = [{} for _ in engines]

    async def poll(self, totals: Callable[[], Awaitable[Mapping[int, _Totals]]]) -> None:
        """Ask for the engines' totals again and again, until they have ended.

        While one does not answer, its gauges are NaN: better no number than an old one.
        """
        is_failing = False
        while True:
            try:
                self._show(await totals())
                is_failing = False
            except EngineDeadError:  # vLLM ends the server, and says why
                return self._show({})
            except Exception as error:
                self._show({})
                if not is_failing:
                    logger.warning("no metrics of the engine until it answers again: %r", error)
                is_failing = True
            num_messages = max(last.get("num_messages", 0) for last in self._last)
            await asyncio.sleep(max(POLL_SECONDS, num_messages / _MESSAGES_PER_SECOND))

    def _show(self, totals: Mapping[int, _Totals]) -> None:
        """Show the totals of the engines that have answered."""
        for engine, gauges in enumerate(self._gauges):
            if engine not in totals:
                for gauge, _ in gauges:
                    gauge.set(math.nan)
                continue
            found = totals[engine]
            for gauge, value in gauges:
                gauge.set(value(found))
            self._count(engine, found)

    def _count(self, engine: int, totals: _Totals) -> None:
        last = self._last[engine]
        for name, counter in self._counters[engine].items():
            key = f"{name}_total"  # left out until there is something to count
            now, before = totals.get(key, 0), last.get(key, 0)
            # An engine that was started again counts from 0.
            counter.inc(now - before if now >= before else now)
        self._last[engine] = totals


def _add(
    registry: CollectorRegistry,
    model: str,
    kind: type[Counter] | type[Gauge] | type[Histogram],
    name: str,
    text: str,
    labels: Sequence[str] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Add a metric to the registry; call it with the values of its labels for one of its series.

    The page may be made of files (PROMETHEUS_MULTIPROC_DIR), for which gauges have a mode.
    """
    metric = kind(
        f"vllm_choreo:{name}", text, ("model_name", *labels), registry=registry, **options
    )
    return partial(metric.labels, model)


def _bounds(
    buckets: str | Sequence[float], overrides: Mapping[str, list[float]] | None
) -> Sequence[float]:
    return histogram_buckets(buckets, overrides=overrides) if isinstance(buckets, str) else buckets
