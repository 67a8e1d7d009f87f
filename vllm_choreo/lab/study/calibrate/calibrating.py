# SPDX-License-Identifier: Apache-2.0
"""Calibration itself: fit on one half of the runs, evaluate on the other, say what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.cli.engine import LocalEngine
from vllm_choreo.lab.cli.report import aligned
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.report.calibration import calibration_html, calibration_rows
from vllm_choreo.lab.report.markup import percent
from vllm_choreo.lab.study.calibrate.candidates import (
    AS_STORED,
    Candidate,
    EvaluatedCandidate,
    candidates_of,
    evaluate,
    prediction_error,
    reached,
)
from vllm_choreo.lab.study.calibrate.fitting import DRAWS, fit
from vllm_choreo.lab.study.calibrate.measure import BLOCK, NUM_BLOCKS
from vllm_choreo.lab.study.results import PAGE, write_results
from vllm_choreo.lab.study.targets import MeasureTarget
from vllm_choreo.repair.policy import Policy
from vllm_choreo.trained_adapter import ModelIdentity

if TYPE_CHECKING:
    from vllm import LLM

FORMAT = 1  # of calibration.json
POLICY, NUMBERS = "policy.json", "calibration.json"


def calibrate(
    llm: LLM,
    learnt: Sequence[Task],
    kept_back: Sequence[Task],
    model: str,
    *,
    rules: Sequence[str],
    budgets: Sequence[float],
    target: MeasureTarget,
    out: Path,
    seed: int,
) -> int:
    """Replay runs, print a table, write the numbers, a page, and a policy if one is to be taken.

    Args:
        llm: engine in this process, which forces tokens.
        learnt, kept_back: tasks of one workflow, with recorded runs: to fit, and to evaluate.
        model: folder or name of the engine's model.
        rules, budgets: repair rules, and budgets of policies, one candidate for each.
        target: quality or time that is to be reached.
        out: an existing folder.
        seed: random seed of the blocks that are drawn.

    Returns:
        The exit status: 0, or 1 if no candidate reaches the target.

    Raises:
        ChoreoError: a run cannot be replayed.
    """
    from tqdm import tqdm

    num_candidates = len(rules) + len(budgets) + 2
    total = len(learnt) * (2 + DRAWS) + len(kept_back) * (1 + num_candidates)
    with tqdm(total=total, desc="calibrating", unit="replay", leave=False) as bar:
        found = fit(llm, learnt, seed, bar.update)
        candidates = candidates_of(found, rules, budgets)
        evaluated = evaluate(llm, kept_back, candidates, bar.update)
    chosen = reached(evaluated, target)
    assert learnt[0].recorded is not None
    workflow = learnt[0].recorded.workflow
    rows = [asdict(candidate) for candidate in evaluated]
    data = {
        "format": FORMAT,
        "facts": {**LocalEngine(llm).facts(()), "workflow": workflow},
        "runs": {"learnt": len(learnt), "kept back": len(kept_back)},
        "rungs": rows,
        "prediction_error": prediction_error(evaluated),
        "target": str(target),
        "chosen": chosen and chosen.name,
    }
    advice = _advice(chosen, target, out)
    write_results(out, NUMBERS, data, calibration_html(data, advice))
    by_name = {candidate.name: candidate for candidate in candidates}
    if chosen is not None and by_name[chosen.name].masks is not None:
        _policy(by_name[chosen.name], chosen, workflow, model).save(out / POLICY)
    head = ("repair", "KL predicted", "KL", "same tokens", "encoded", "share", "TTFT")
    print(aligned([head, *calibration_rows(rows)], num_names=1))
    if data["prediction_error"] is not None:
        error = percent(prediction_error(evaluated))
        print(f"\nPredicted KL is off by {error} of that without repair, on average.")
    print(f"{advice}\n\nOpen {out / PAGE}")
    return 0 if chosen is not None else 1


def _policy(
    candidate: Candidate, evaluated: EvaluatedCandidate, workflow: str, model: str
) -> Policy:
    assert candidate.masks is not None
    return Policy(
        workflow=workflow,
        model=ModelIdentity.of(model),
        block=BLOCK,
        num_blocks=NUM_BLOCKS,
        masks={role: dict(masks) for role, masks in candidate.masks.items()},
        budget=candidate.budget,
        measured=asdict(evaluated),
    )


def _advice(chosen: EvaluatedCandidate | None, target: MeasureTarget, out: Path) -> str:
    """Advice to the user, in a sentence."""
    if chosen is None:
        return (
            f"No candidate reaches {target}: encode everything anew (mode exact), or train an "
            "adapter (docs/training.md)."
        )
    if chosen.name == AS_STORED:
        return f"{target} is reached without repair."
    if chosen.name.startswith("policy"):
        return f'{target} is reached by repair="{out / POLICY}" ({chosen.name}).'
    return f"{target} is reached by repair={json.dumps(chosen.name)}."
