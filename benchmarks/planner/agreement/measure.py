# SPDX-License-Identifier: Apache-2.0
"""Runs of one batch as text and as a choreographed plan, compared token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planner.agreement.forced import ForcedWorker
from vllm_choreo.lab.study.divergence import kl_per_token
from vllm_choreo.planner import CompiledGraph, Planner

# Token ids of each prompt's answer, by the prompt's text.
Answers = Mapping[str, Sequence[int]]


def run_plan(
    llm: Any, batch: CompiledGraph, mode: str, said: Answers | None = None, **options: Any
) -> tuple[ForcedWorker, list[Any]]:
    """Run a batch by its plan.

    Args:
        llm: an engine in this process that forces tokens.
        batch: what is run.
        mode: of `Choreography`: "choreo", or "baseline", in which the plan is exact: text.
        said: as `ForcedWorker` takes them.
        options: arguments of `FacadeWorker`.

    Returns:
        The worker that ran the calls, and the result of each query.
    """
    from vllm_choreo import Choreography

    semantics = "exact" if mode == "baseline" else "choreo"
    with Choreography(llm, mode=mode) as c:
        worker = ForcedWorker(c, said, **options)
        planner = Planner(worker, semantics=semantics)
        for node in batch.graph.nodes:
            if node.kind == "llm":
                planner.profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
        return worker, list(planner.invoke(batch))


def compare_calls(
    llm: Any, batch: CompiledGraph, said: Answers, rule: str | None
) -> list[dict[str, Any]]:
    """Compare a choreographed plan's distributions with the text's, at every token that was said.

    Args:
        llm: an engine in this process that forces tokens.
        batch: what is run.
        said: token ids of each prompt's answer, by the prompt's text.
        rule: repair of the plan; None: none.

    Returns:
        A row for each call. `first` is the number of tokens before one whose likeliest is another;
        `kl` is from the text's distribution, in nats, a mean over tokens.
    """
    base, _ = run_plan(llm, batch, "baseline", said)
    plan, _ = run_plan(llm, batch, "choreo", said, repair=rule)
    rows = []
    for call, prompt in enumerate(base.distributions):
        one, other = base.distributions[prompt], plan.distributions[prompt]
        same = one.argmax(axis=1) == other.argmax(axis=1)
        rows.append(
            {
                "call": call,
                "exact": plan.exact[prompt],
                "tokens": len(same),
                "first": len(same) if same.all() else int(same.argmin()),
                "kl": float(kl_per_token(one, other).mean()),
                "top1": float(same.mean()),
            }
        )
    return rows


def compare_results(
    llm: Any, batch: CompiledGraph, expected: list[Any], rule: str | None
) -> list[dict[str, Any]]:
    """Let a choreographed plan answer freely, and compare its results with the text's.

    Args:
        llm: an engine in this process that forces tokens.
        batch: what is run.
        expected: results of the text, one for each query.
        rule: repair of the plan; None: none.

    Returns:
        A row for each result: whether it is the same, its words, and how many of them come before
        one differs.
    """
    _, results = run_plan(llm, batch, "choreo", None, repair=rule)
    rows = []
    for query, (one, other) in enumerate(zip(expected, results, strict=True)):
        texts = zip(_texts(one), _texts(other), strict=True)
        for number, (mine, theirs) in enumerate(texts):
            begin = sum(1 for _ in _alike(mine.split(), theirs.split()))
            shown = {"query": query, "result": number, "same": int(mine == theirs)}
            rows.append({**shown, "words": len(mine.split()), "alike": begin})
    return rows


def _texts(result: Any) -> list[str]:
    return list(result.values()) if isinstance(result, dict) else [result]


def _alike(mine: list[str], theirs: list[str]) -> Any:
    """Yield words until they differ."""
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return
        yield one
