# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of transcripts: which call read which messages, when, at what cost.

`page.html` is the frame; the templates beside it are its style and its scripts. The data goes into
the page as JSON, and the scripts put text into the document as text alone, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.transcript.templates import template_environment


@dataclass(frozen=True)
class Shown:
    """A transcript on the page.

    Attributes:
        transcript: value of `Transcript.to_json()`.
        correct: True if its answers were right; None if that is not known.
    """

    transcript: Mapping[str, Any]
    correct: bool | None = None


@dataclass(frozen=True)
class ShownProblem:
    """A problem on the page, and its runs.

    Attributes:
        id: name of the problem.
        question: its text.
        expected: right answers, one for each thing asked; empty if they are not known.
        runs: transcripts, one per mode.
    """

    id: str
    question: str
    expected: Sequence[str]
    runs: Sequence[Shown]


def page_html(workflow: str, problems: Sequence[ShownProblem], facts: Mapping[str, str]) -> str:
    """Write the page.

    Args:
        workflow: name of the workflow.
        problems: problems in order; at least one, each with at least one run.
        facts: facts that the page's header shows, by name, for example {"model": "SmolLM2-135M"}.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    data = {
        "workflow": workflow,
        "facts": dict(facts),
        "problems": [_problem(problem) for problem in problems],
    }
    page = template_environment().get_template("page.html")
    return page.render(workflow=workflow, data=data)


def _problem(problem: ShownProblem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "question": problem.question,
        "expected": list(problem.expected),
        "runs": [_run(run) for run in problem.runs],
    }


def _run(run: Shown) -> dict[str, Any]:
    transcript = run.transcript
    return {
        "mode": transcript["mode"],
        "seconds": transcript["seconds"],
        "answers": transcript["answers"],
        "correct": run.correct,
        "steps": [_step(step) for step in transcript["steps"]],
    }


_STEP_KEYS = (
    *("stage", "author", "kind", "id", "parents", "position", "num_tokens", "text"),
    *("generated_text", "finish_reason", "usage", "metrics"),
)


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Step of a transcript without its token ids, of which only the number is shown."""
    slim = {key: step[key] for key in _STEP_KEYS}
    return {**slim, "num_generated": len(step["generated_token_ids"])}
