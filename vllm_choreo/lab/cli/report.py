# SPDX-License-Identifier: Apache-2.0
"""Results of `vllm-choreo run`: transcripts, the page, and a table of sums."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.task import Task, transcript_json
from vllm_choreo.transcript.page import Shown, ShownProblem, page_html
from vllm_choreo.transcript.transcript import Transcript

# Inputs of a game that are long, and say nothing to a reader.
_NOT_SHOWN = ("turns", "plans")


@dataclass(frozen=True)
class Result:
    """A task that was run in one mode. `correct` is None if the right answer is not known."""

    task: Task
    transcript: Transcript
    correct: bool | None


def save_transcript(result: Result, path: Path) -> None:
    """Write a transcript with its problems; the file is whole or not there."""
    data = transcript_json(result.task, result.transcript)
    write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def save_page(
    workflow: str, results: Sequence[Result], facts: Mapping[str, str], path: Path
) -> None:
    """Write one page of all results."""
    problems = [
        ShownProblem(
            id=task.id,
            question=question_of(task, runs[0].transcript.inputs),
            expected=task.expected(),
            runs=[Shown(run.transcript.to_json(), run.correct) for run in runs],
        )
        for task, runs in _by_task(results)
    ]
    write_text(path, page_html(workflow, problems, facts))


def _by_task(results: Sequence[Result]) -> list[tuple[Task, list[Result]]]:
    tasks = {id(result.task): result.task for result in results}
    return [(task, [run for run in results if run.task is task]) for task in tasks.values()]


def question_of(task: Task, inputs: Mapping[str, Any]) -> str:
    """The question, for a reader; of a game, how it was set up."""
    if task.problems:
        return "\n\n".join(problem.question for problem in task.problems)
    settings = {
        name: ", ".join(value) if isinstance(value, list) else value
        for name, value in inputs.items()
        if not name.endswith("_params") and name not in _NOT_SHOWN
    }
    return "\n".join(f"{name}: {value}" for name, value in settings.items())


def facts_of(engine: Mapping[str, str], modes: Sequence[str], task: Task) -> dict[str, str]:
    """Facts about the run as a whole, for the page; `engine`: the engine's facts."""
    facts = {**engine, "mode": " and ".join(modes)}
    if task.recorded is not None:
        return {**facts, "tokens": "replayed"}
    given = task.inputs["sampling_params"]
    sampling = given if isinstance(given, Mapping) else {
        name: getattr(given, name) for name in ("temperature", "seed", "max_tokens")
    }  # fmt: skip
    return {
        **facts,
        "temperature": f"{sampling['temperature']:g}",
        "seed": str(sampling["seed"]),
        "tokens": f"at most {sampling['max_tokens']} per answer",
    }


def table(results: Sequence[Result]) -> str:
    """One line per set of problems and mode."""
    head = ("problems", "mode", "right", "calls", "reused", "encoded", "TTFT", "seconds")
    keys = dict.fromkeys((result.task.source, result.transcript.mode) for result in results)
    lines = [head, *(_row(key, results) for key in keys)]
    return aligned(lines, num_names=2)


def aligned(lines: Sequence[Sequence[str]], num_names: int) -> str:
    """A table for a terminal: the first line is the head, the first columns are names."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = list(zip(line, widths, strict=True))
        names = [cell.ljust(width) for cell, width in cells[:num_names]]
        text.append("  ".join(names + [cell.rjust(width) for cell, width in cells[num_names:]]))
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _row(key: tuple[str, str], results: Sequence[Result]) -> tuple[str, ...]:
    mine = [r for r in results if (r.task.source, r.transcript.mode) == key]
    messages = [step.message for r in mine for step in r.transcript.steps]
    ttfts = [m.metrics.ttft for m in messages if m.generated_token_ids]
    judged = [r.correct for r in mine if r.correct is not None]
    return (
        *key,
        f"{sum(judged)} of {len(judged)}" if judged else f"- of {len(mine)}",
        f"{len(messages):,}",
        f"{sum(m.usage.reused_tokens for m in messages):,}",
        f"{sum(m.usage.encoded_tokens for m in messages):,}",
        f"{1000 * statistics.median(ttfts):.0f} ms" if ttfts else "-",
        f"{sum(r.transcript.seconds for r in mine):.1f}",
    )
