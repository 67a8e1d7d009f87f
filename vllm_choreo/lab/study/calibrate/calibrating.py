# SPDX-License-Identifier: Apache-2.0
"""Calibration itself: fit on one half of the runs, evaluate on the other, say what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.cli.engine import LocalEngine
from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.report import aligned
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.report.calibration import calibration_html
from vllm_choreo.lab.report.markup import milliseconds, percent
from vllm_choreo.lab.study.calibrate.fitting import DRAWS, fit
from vllm_choreo.lab.study.calibrate.measure import BLOCK, NUM_BLOCKS
from vllm_choreo.lab.study.calibrate.rungs import (
    AS_STORED,
    Candidate,
    EvaluatedCandidate,
    candidates_of,
    evaluate,
    prediction_error,
    reached,
)
from vllm_choreo.repair.policy import Policy
from vllm_choreo.trained_adapter import ModelIdentity

FORMAT = 1  # of calibration.json
POLICY, NUMBERS, PAGE = "policy.json", "calibration.json", "index.html"


def calibrate(
    llm: Any,
    tasks: Sequence[Task],
    model: str,
    *,
    rules: Sequence[str],
    budgets: Sequence[float],
    target: tuple[str, float],
    out: Path,
    seed: int,
) -> int:
    """Replay runs, print a table, write the numbers, a page, and a policy if one is to be taken.

    Args:
        llm: engine in this process, which forces tokens.
        tasks: two or more tasks of one workflow, with recorded runs.
        model: folder or name of the engine's model.
        rules, budgets: repair rules, and budgets of policies, one candidate for each.
        target: see `target_of`.
        out: an existing folder.
        seed: random seed of the blocks that are drawn.

    Returns:
        The exit status: 0, or 1 if no candidate reaches the target.

    Raises:
        ChoreoError: a run cannot be replayed.
    """
    from tqdm import tqdm

    learnt, kept_back = tasks[::2], tasks[1::2]
    num_candidates = len(rules) + len(budgets) + 2
    total = len(learnt) * (2 + DRAWS) + len(kept_back) * (1 + num_candidates)
    with tqdm(total=total, desc="calibrating", unit="replay", leave=False) as bar:
        found = fit(llm, learnt, seed, bar.update)
        candidates = candidates_of(found, rules, budgets)
        evaluated = evaluate(llm, kept_back, candidates, bar.update)
    chosen = reached(evaluated, target)
    assert tasks[0].recorded is not None
    workflow = tasks[0].recorded.workflow
    data = {
        "format": FORMAT,
        "facts": {**LocalEngine(llm).facts(()), "workflow": workflow},
        "runs": {"learnt": len(learnt), "kept back": len(kept_back)},
        "rungs": [candidate.to_json() for candidate in evaluated],
        "prediction_error": prediction_error(evaluated),
        "target": f"{target[0]}={target[1]:g}",
        "chosen": chosen and chosen.name,
    }
    advice = _advice(chosen, str(data["target"]), out)
    write_text(out / NUMBERS, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    write_text(out / PAGE, calibration_html(data, advice))
    by_name = {candidate.name: candidate for candidate in candidates}
    if chosen is not None and by_name[chosen.name].masks is not None:
        _policy(by_name[chosen.name], chosen, workflow, model).save(out / POLICY)
    print(_table(evaluated))
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
        measured=evaluated.to_json(),
    )


def _advice(chosen: EvaluatedCandidate | None, target: str, out: Path) -> str:
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


def _table(evaluated: Sequence[EvaluatedCandidate]) -> str:
    head = ("repair", "KL predicted", "KL", "same tokens", "encoded", "share", "TTFT")
    rows = [
        (
            candidate.name,
            "-" if candidate.predicted is None else f"{candidate.predicted:.4f}",
            f"{candidate.kl:.4f} ({candidate.kl_low:.4f} to {candidate.kl_high:.4f})",
            percent(candidate.agreement),
            f"{candidate.encoded:,.0f}",
            percent(candidate.share),
            milliseconds(candidate.ttft),
        )
        for candidate in evaluated
    ]
    return aligned([head, *rows], num_names=1)
