# SPDX-License-Identifier: Apache-2.0
"""Servers that are asked the same in turn: one without the plugin, one with it in several ways."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from benchmarks.harness.turns import in_turn
from benchmarks.rivals.layouts import Ask, Layout
from benchmarks.rivals.questions import f1
from vllm_choreo.lab.problems.grading import is_correct

STOCK = "stock"
_CHOREO = {"choreo_auto": "choreo", "choreo_auto_cut": "content"}
_ALONE = {**_CHOREO, "choreo_auto_context": "alone"}
_SEEN = {**_CHOREO, "choreo_auto_context": "seen"}
# What requests to a server with the plugin say, by the name of the way. "repair" says its rule,
# too, and "adapter" the adapter by which its pieces are encoded.
WAYS: Mapping[str, Mapping[str, str]] = {
    "exact": {"choreo_auto": "exact", "choreo_auto_cut": "content"},
    "seen": _SEEN,
    "alone": _ALONE,
    "repair": _SEEN,
    "adapter": _ALONE,
}
Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """A server, and what requests say to it.

    Attributes:
        name: "stock", or one of `WAYS`.
        http: a client of the server. Sides of one API key find what the others have sent.
        model: name of its model, or of an adapter of it.
        extra: keys of the body of every request.
    """

    name: str
    http: httpx.Client
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)


def sides_of(
    stock: httpx.Client | None, ours: Mapping[str, httpx.Client], repair: str, adapter: str | None
) -> list[Side]:
    """The sides of a comparison.

    Args:
        stock: a client of a server without the plugin; None: there is none.
        ours: clients of a server with it, by the ways that are asked for.
        repair: rule of the way "repair".
        adapter: name of the adapter of the way "adapter".

    Raises:
        SystemExit: the way "adapter" without one.
    """
    found = [] if stock is None else [Side(STOCK, stock, model_of(stock))]
    for way, http in ours.items():
        if way == "adapter" and not adapter:
            raise SystemExit("the way adapter needs --adapter")
        xargs = {**WAYS[way], **({"choreo_repair": repair} if way == "repair" else {})}
        model = str(adapter) if way == "adapter" else model_of(http)
        found.append(Side(way, http, model, {"vllm_xargs": xargs}))
    return found


def model_of(http: httpx.Client) -> str:
    """The model that a server serves."""
    answer = http.get("/v1/models").raise_for_status().json()
    return str(answer["data"][0]["id"])


def count_requests(make: Callable[[], Layout]) -> int:
    """Number of requests of a layout that are counted; what is answered does not change it."""
    layout, count = make(), 0
    try:
        asked = next(layout)
        while True:
            count += asked.kind == "timed"
            asked = layout.send("")
    except StopIteration:
        return count


def run(
    name: str,
    sides: Sequence[Side],
    make: Callable[[], Layout],
    ignore_eos: bool,
    on_answers: Callable[[Rows], None],
    first_number: int = 0,
) -> Rows:
    """Ask all sides all requests of a layout, in turn: a row for each answer.

    Args:
        name: of the layout.
        make: begins the layout anew, for each side.
        ignore_eos: every answer is as long as it may be.
        on_answers: called with the answers of all sides to a request.
        first_number: number of the first request.
    """
    layouts = {side.name: make() for side in sides}
    asks = {side: next(layout) for side, layout in layouts.items()}
    rows: Rows = []
    number = first_number
    while asks:
        answers: dict[str, dict[str, Any]] = {}
        for side in in_turn(sides, number):
            answers[side.name] = answer = ask(side, asks[side.name], ignore_eos)
            rows.append({"layout": name, "number": number, "side": side.name, **answer})
        _compare(rows[-len(sides) :], asks)
        on_answers(rows[-len(sides) :])
        following = {}
        for asked, layout in layouts.items():
            try:
                following[asked] = layout.send(answers[asked]["answer"])
            except StopIteration:
                continue
        asks, number = following, number + 1
    return rows


def _compare(rows: Sequence[dict[str, Any]], asks: Mapping[str, Ask]) -> None:
    """Add to each row how good its answer is, and how near to that of the first side."""
    by_side = {row["side"]: row for row in rows}
    reference = by_side.get(STOCK, rows[0])["answer"]
    for row in rows:
        gold, answer = asks[row["side"]].gold, row["answer"]
        row["f1"] = round(f1(answer, gold), 4) if gold else ""
        row["right"] = int(is_correct("trivia", answer, gold)) if gold else ""
        row["same"] = int(answer == reference)
        row["f1_to_stock"] = round(f1(answer, [reference]), 4)


def ask(side: Side, asked: Ask, ignore_eos: bool) -> dict[str, Any]:
    """One request, as a stream: seconds to its first token and to its end, tokens and text."""
    body = {
        "model": side.model,
        "messages": asked.chat,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_eos and not asked.gold else {}),
        **side.extra,
    }
    text, began = "", time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    with side.http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{side.name}: {response.read().decode()[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                content = choice["delta"].get("content")
                # The last event of an answer has its reason, and no text if it had none.
                if first is None and (content or choice.get("finish_reason")):
                    first = time.perf_counter() - began
                text += content or ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "kind": asked.kind,
        "first_token_s": round(first or 0.0, 5),
        "seconds": round(time.perf_counter() - began, 5),
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": cached,
        "answer_tokens": usage.get("completion_tokens", 0),
        "answer": text,
    }
