# SPDX-License-Identifier: Apache-2.0
"""The rungs of a calibration: what each should buy, what it does buy, and which one to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.calibrate.fitting import Fit
from vllm_choreo.lab.study.calibrate.measure import BLOCK, Heard, Replays
from vllm_choreo.lab.study.calibrate.repaired import policy_choice
from vllm_choreo.lab.study.stats import bootstrap_interval
from vllm_choreo.lab.study.targets import target_given
from vllm_choreo.repair.calibration import Key
from vllm_choreo.repair.rules import rule_given

AS_STORED, ALL = "none", "all"


@dataclass(frozen=True)
class Rung:
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
    rule: Any = None
    masks: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None
    budget: float = 0.0
    predicted: float | None = None


@dataclass(frozen=True)
class Climbed:
    """Results of a rung on the runs that were kept back: means of runs, KL of all tokens.

    Attributes:
        name, predicted: name and prediction of the rung.
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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def rungs_of(found: Fit, rules: Sequence[str], budgets: Sequence[float]) -> list[Rung]:
    """The rungs in order: nothing, the rules, a policy for each budget, everything."""
    rungs = [Rung(AS_STORED, AS_STORED, predicted=found.kl / found.num_tokens)]
    for text in rules:
        given = rule_given(text)
        rungs.append(Rung(text, given, predicted=_predicted(found, given)))
    for budget in budgets:
        masks = found.masks(budget)
        predicted = found.predicted(_share_of_masks(masks))
        rungs.append(Rung(f"policy {100 * budget:g} %", None, masks, budget, predicted))
    return [*rungs, Rung(ALL, ALL, predicted=0.0)]


def _predicted(found: Fit, given: Any) -> float | None:
    """Predicted KL of a rule whose blocks are known beforehand, or drawn; else None."""
    if isinstance(given, Mapping) and given.get("by") == "random":
        return found.predicted(lambda key: float(given["share"]))
    name, _, count = str(given).partition(":")
    if name != "first":
        return None
    return found.predicted(lambda key: min(1.0, max(0.0, (int(count) - key.block * BLOCK) / BLOCK)))


def _share_of_masks(
    masks: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Callable[[Key], float]:
    return lambda key: float(key.block in masks[key.role][key.parent])


def climb(
    llm: Any, tasks: Sequence[Task], rungs: Sequence[Rung], on_replay: Callable[[], None]
) -> list[Climbed]:
    """Replay runs on every rung; `on_replay` is called after each, `1 + len(rungs)` of each run.

    Raises:
        ChoreoError: a run cannot be replayed.
    """
    heard: list[list[Heard]] = [[] for _ in rungs]
    for task in tasks:
        replays = Replays(llm, task)
        on_replay()
        for of_rung, rung in zip(heard, rungs, strict=True):
            choose = None if rung.masks is None else policy_choice(rung.masks)
            of_rung.append(replays.heard(rung.rule, choose))
            on_replay()
    return [_climbed(rung, runs, heard[0]) for rung, runs in zip(rungs, heard, strict=True)]


def _climbed(rung: Rung, runs: Sequence[Heard], plain: Sequence[Heard]) -> Climbed:
    pairs = [(sum(run.kl), run.num_tokens) for run in runs]
    low, high = bootstrap_interval(pairs, _ratio)
    more = sum(a.num_encoded - b.num_encoded for a, b in zip(runs, plain, strict=True))
    return Climbed(
        name=rung.name,
        predicted=rung.predicted,
        kl=_ratio(pairs),
        kl_low=low,
        kl_high=high,
        agreement=sum(sum(run.same) for run in runs) / sum(run.num_tokens for run in runs),
        encoded=fmean(run.num_encoded for run in runs),
        share=more / max(1, sum(run.num_reused for run in plain)),
        ttft=fmean(run.ttft for run in runs),
    )


def _ratio(pairs: Sequence[Any]) -> float:
    above, below = map(sum, zip(*pairs, strict=True))
    return float(above / below)


def prediction_error(climbed: Sequence[Climbed]) -> float | None:
    """Mean of |predicted - found| over the rungs but the last, as a share of what there is to gain.

    There is the KL to the text without repair to gain; None if that is 0.
    """
    gap = climbed[0].kl
    errors = [abs(rung.predicted - rung.kl) for rung in climbed[:-1] if rung.predicted is not None]
    return fmean(errors) / gap if gap > 0 else None


# -- targets -------------------------------------------------------------------------------------

_TARGETS: dict[str, Callable[[Climbed, float], bool]] = {
    "kl": lambda rung, most: rung.kl <= most,
    "agreement": lambda rung, least: rung.agreement >= least,
    "ttft": lambda rung, most: rung.ttft <= most,
}


def target_of(text: str) -> tuple[str, float]:
    """A target as an argument gives it.

    Raises:
        RepairError: no such target, or no number behind it.
    """
    says = "kl=NATS per token, agreement=SHARE of tokens, or ttft=SECONDS"
    return target_given(text, _TARGETS, says)


def reached(climbed: Sequence[Climbed], target: tuple[str, float]) -> Climbed | None:
    """The rung to take: the cheapest that is near enough, or the nearest that is fast enough.

    None: no rung reaches the target, or only encoding everything again does.
    """
    name, value = target
    fit = [rung for rung in climbed if rung.name != ALL and _TARGETS[name](rung, value)]
    if not fit:
        return None
    return min(fit, key=lambda rung: rung.kl if name == "ttft" else rung.encoded)
