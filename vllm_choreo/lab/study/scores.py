# SPDX-License-Identifier: Apache-2.0
"""Scores of several arms on the same problems: one row of numbers for each arm.

Arms are compared with the text, problem by problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from vllm_choreo.lab.study.stats import bootstrap_interval, mcnemar, wilson_interval

# What arms are compared with, and what adapters are to improve on.
TEXT, CHOREOGRAPHED = "text", "choreographed"


@dataclass(frozen=True)
class Judged:
    """Answers and measurements of an arm on one problem.

    Attributes:
        answers: answers of the workflow.
        is_right: True if they are right; None: it is not known.
        kl: KL(text || arm), nats, summed over the tokens that the text generated; None: not
            measured.
        num_tokens: number of these tokens.
        coverage: share of all that was asked for that its answers hold, from 0 to 1; None: it is
            not known.
        same_calls: (calls in which the arm and the text find the same token likeliest at every
            place, calls), the text's tokens forced, by the role of the text's message.
        num_encoded: tokens that its calls encoded before they generated any.
        ttft: mean seconds to the first token of its calls that generate; None: none does.
    """

    answers: tuple[str, ...]
    is_right: bool | None
    kl: float | None = None
    num_tokens: int = 0
    num_encoded: int = 0
    ttft: float | None = None
    coverage: float | None = None
    same_calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def rows_of(arms: Mapping[str, Sequence[Judged]]) -> list[dict[str, Any]]:
    """Score arms, one row for each.

    Args:
        arms: problems of each arm by its name, the same in the same order; `TEXT` is among them.

    Returns:
        For each arm: `problems`, `judged` (of which the right answer is known), `right`;
        `accuracy` with Wilson's interval; `difference` from the text's with the bootstrap's of
        pairs; `worse` and `better` than the text, and the p-value of McNemar's exact test; `same`,
        the share of problems with the text's very answers; `coverage`, the mean of problems, and
        `uncovered`, how much less that is than the text's, with the bootstrap's intervals;
        `same_calls` and `compared_calls`, by role; `kl`, nats per token, with the bootstrap's
        interval of problems; `encoded`, tokens, and `ttft`, seconds, both the means of
        problems; `gap_closed` and `kl_gap_closed`: of what choreography loses against the text, the
        share that the arm regains, in accuracy and in KL. Intervals
        are of 95 %, in `…_low` and `…_high`; None stands for what there is not.
    """
    rows = []
    for name, found in arms.items():
        row = {"arm": name, "problems": len(found), **_accuracy(found, arms[TEXT]), **kl_row(found)}
        row |= {**_coverage(found, arms[TEXT]), **_same_calls(found)}
        rows.append({**row, **cost_row(found), **_gaps(name, arms)})
    return rows


def _accuracy(found: Sequence[Judged], text: Sequence[Judged]) -> dict[str, Any]:
    pairs = [
        (bool(mine.is_right), bool(its.is_right))
        for mine, its in zip(found, text, strict=True)
        if mine.is_right is not None
    ]
    right, same = sum(mine for mine, _ in pairs), _same(found, text)
    if not pairs:
        nothing = dict.fromkeys(("right", "worse", "better", "p_value"))
        return {"judged": 0, **nothing, **_named("accuracy"), **_named("difference"), "same": same}
    less = [mine - its for mine, its in pairs]
    worse, better = less.count(-1), less.count(1)
    return {
        "judged": len(pairs),
        "right": right,
        **_named("accuracy", right / len(pairs), wilson_interval(right, len(pairs))),
        **_named("difference", fmean(less), bootstrap_interval(less, fmean)),
        "worse": worse,
        "better": better,
        "p_value": mcnemar(worse, better),
        "same": same,
    }


def _same(found: Sequence[Judged], text: Sequence[Judged]) -> float:
    return fmean(mine.answers == its.answers for mine, its in zip(found, text, strict=True))


def _coverage(found: Sequence[Judged], text: Sequence[Judged]) -> dict[str, Any]:
    pairs = [
        (mine.coverage, its.coverage)
        for mine, its in zip(found, text, strict=True)
        if mine.coverage is not None and its.coverage is not None
    ]
    if not pairs:
        return {**_named("coverage"), **_named("uncovered")}
    mine, less = [one for one, _ in pairs], [its - one for one, its in pairs]
    return {
        **_named("coverage", fmean(mine), bootstrap_interval(mine, fmean)),
        **_named("uncovered", fmean(less), bootstrap_interval(less, fmean)),
    }


def _same_calls(found: Sequence[Judged]) -> dict[str, Any]:
    same: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for one in found:
        same.update({role: counts[0] for role, counts in one.same_calls.items()})
        compared.update({role: counts[1] for role, counts in one.same_calls.items()})
    return {"same_calls": dict(same), "compared_calls": dict(compared)}


def kl_row(found: Sequence[Judged]) -> dict[str, Any]:
    """`kl`, nats per token, and its interval, as in `rows_of`."""
    sums = [(one.kl, one.num_tokens) for one in found if one.kl is not None]
    if not sums:
        return _named("kl")
    return _named("kl", _ratio(sums), bootstrap_interval(sums, _ratio))


def cost_row(found: Sequence[Judged]) -> dict[str, Any]:
    """`encoded` and `ttft`, as in `rows_of`."""
    ttfts = [one.ttft for one in found if one.ttft is not None]
    return {
        "encoded": fmean(one.num_encoded for one in found),
        "ttft": fmean(ttfts) if ttfts else None,
    }


def _gaps(name: str, arms: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """Gaps that an arm closes; None for text and choreography, between which the gap is."""
    nothing = {"gap_closed": None, **_named("kl_gap_closed")}
    if name in (TEXT, CHOREOGRAPHED) or CHOREOGRAPHED not in arms:
        return nothing
    found, choreo, text = (_share_right(arms[arm]) for arm in (name, CHOREOGRAPHED, TEXT))
    gaps = dict(nothing)
    if found is not None and choreo is not None and text is not None and text > choreo:
        gaps["gap_closed"] = (found - choreo) / (text - choreo)
    pairs = [
        (mine.kl, its.kl)
        for mine, its in zip(arms[name], arms[CHOREOGRAPHED], strict=True)
        if mine.kl is not None and its.kl
    ]
    if pairs:
        gaps |= _named("kl_gap_closed", _closed(pairs), bootstrap_interval(pairs, _closed))
    return gaps


def _share_right(found: Sequence[Judged]) -> float | None:
    judged = [one.is_right for one in found if one.is_right is not None]
    return fmean(judged) if judged else None


def _ratio(pairs: Sequence[Any]) -> float:
    above, below = map(sum, zip(*pairs, strict=True))
    return float(above / below)


def _closed(pairs: Sequence[Any]) -> float:
    return 1 - _ratio(pairs)


def _named(
    name: str,
    value: float | None = None,
    interval: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    return {name: value, f"{name}_low": interval[0], f"{name}_high": interval[1]}
