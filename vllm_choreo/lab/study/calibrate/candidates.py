# SPDX-License-Identifier: Apache-2.0
"""Candidates of a calibration: what each should buy, what it does, and which one to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from vllm_choreo.lab.cli.options import repair_of
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.calibrate.fitting import Fit
from vllm_choreo.lab.study.calibrate.measure import BLOCK, MeasuredReplay, Replays
from vllm_choreo.lab.study.calibrate.repaired import policy_choice
from vllm_choreo.lab.study.scores import cost_row, kl_row
from vllm_choreo.lab.study.targets import MeasureTarget
from vllm_choreo.repair.calibration import Key
from vllm_choreo.repair.rules import FirstTokens, RandomBlocks, rule_of
from vllm_choreo.semantics.session_options import RepairGiven

if TYPE_CHECKING:
    from vllm import LLM

AS_STORED, ALL = "none", "all"


@dataclass(frozen=True)
class Candidate:
    """One way of repairing.

    Attributes:
        name: name for a reader; that of a rule is the rule.
        rule: rule of a session; None where there are masks.
        masks: masks of a policy; None where there is a rule.
        budget: budget of a policy, a share of the reused tokens.
        predicted: KL to the text, nats per token, as the first half of the runs tells; None where
            it tells nothing.
    """

    name: str
    rule: RepairGiven = None
    masks: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None
    budget: float = 0.0
    predicted: float | None = None


@dataclass(frozen=True)
class EvaluatedCandidate:
    """Results of a candidate on the runs that were kept back: means of runs, KL of all tokens.

    Attributes:
        name, predicted: name and prediction of the candidate.
        kl, kl_low, kl_high: KL to the text, nats per token, with the bootstrap's interval of runs.
        agreement: share of the tokens at which the likeliest one is the text's.
        encoded: tokens per run, before any are generated.
        share: share of the reused tokens that is encoded for repair.
        ttft: seconds to the first token.
    """

    name: str
    predicted: float | None
    kl: float
    kl_low: float
    kl_high: float
    agreement: float
    encoded: float
    share: float
    ttft: float


def candidates_of(found: Fit, rules: Sequence[str], budgets: Sequence[float]) -> list[Candidate]:
    """Candidates in order: nothing, the rules, a policy for each budget, everything."""
    candidates = [Candidate(AS_STORED, AS_STORED, predicted=found.kl / found.num_tokens)]
    for text in rules:
        given = repair_of(text)
        candidates.append(Candidate(text, given, predicted=_predicted(found, given)))
    for budget in budgets:
        masks = found.masks(budget)
        predicted = found.predicted(_share_of_masks(masks))
        candidates.append(Candidate(f"policy {100 * budget:g} %", None, masks, budget, predicted))
    return [*candidates, Candidate(ALL, ALL, predicted=0.0)]


def _predicted(found: Fit, given: RepairGiven) -> float | None:
    """Predicted KL of a rule whose blocks are known beforehand, or drawn; else None."""
    rule = rule_of(given)
    if isinstance(rule, RandomBlocks):
        return found.predicted(lambda key: rule.share)
    if not isinstance(rule, FirstTokens):
        return None
    return found.predicted(lambda key: min(1.0, max(0.0, (rule.count - key.block * BLOCK) / BLOCK)))


def _share_of_masks(
    masks: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Callable[[Key], float]:
    return lambda key: float(key.block in masks[key.role][key.parent])


def evaluate(
    llm: LLM, tasks: Sequence[Task], candidates: Sequence[Candidate], on_replay: Callable[[], None]
) -> list[EvaluatedCandidate]:
    """Replay runs on every candidate.

    Args:
        on_replay: called after each replay; there are `1 + len(candidates)` of each run.

    Raises:
        ChoreoError: a run cannot be replayed.
    """
    measured: list[list[MeasuredReplay]] = [[] for _ in candidates]
    for task in tasks:
        replays = Replays(llm, task)
        on_replay()
        for of_candidate, candidate in zip(measured, candidates, strict=True):
            choose = None if candidate.masks is None else policy_choice(candidate.masks)
            of_candidate.append(replays.measure(candidate.rule, choose))
            on_replay()
    return [
        _evaluated(candidate, runs, measured[0])
        for candidate, runs in zip(candidates, measured, strict=True)
    ]


def _evaluated(
    candidate: Candidate, runs: Sequence[MeasuredReplay], plain: Sequence[MeasuredReplay]
) -> EvaluatedCandidate:
    judged = [run.judged for run in runs]
    more = sum(a.num_encoded - b.num_encoded for a, b in zip(runs, plain, strict=True))
    return EvaluatedCandidate(
        name=candidate.name,
        predicted=candidate.predicted,
        agreement=sum(sum(run.same) for run in runs) / sum(run.num_tokens for run in runs),
        share=more / max(1, sum(run.num_reused for run in plain)),
        **kl_row(judged),
        **cost_row(judged),
    )


def prediction_error(evaluated: Sequence[EvaluatedCandidate]) -> float | None:
    """Mean of |predicted - found| over all candidates but the last, as a share of the whole gain.

    There is the KL to the text without repair to gain; None if that is 0.
    """
    gap = evaluated[0].kl
    errors = [
        abs(candidate.predicted - candidate.kl)
        for candidate in evaluated[:-1]
        if candidate.predicted is not None
    ]
    return fmean(errors) / gap if gap > 0 else None


def reached(
    evaluated: Sequence[EvaluatedCandidate], target: MeasureTarget
) -> EvaluatedCandidate | None:
    """Candidate to take: see `MeasureTarget.choose`.

    None: no candidate reaches the target, or only encoding everything again does.
    """
    less = [candidate for candidate in evaluated if candidate.name != ALL]
    return target.choose(less, cost="encoded", distance="kl")
