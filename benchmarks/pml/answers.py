# SPDX-License-Identifier: Apache-2.0
"""Answers of prompts from schemas, scored: as text, and with modules encoded in several ways."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pml.texts import problem_prompt, problem_schema, without_scaffolds
from vllm_choreo.lab.problems import (
    Problem,
    fact_pairs,
    key_values,
    list_pairs,
    load_jsonl,
    sentence_facts,
)
from vllm_choreo.lab.problems.grading import coverage, is_correct
from vllm_choreo.lab.problems.long_documents import reports
from vllm_choreo.lab.study.stats import bootstrap_interval, mcnemar, wilson_interval

SEED = 1
_ROOM = 48  # tokens of a turn's template, and of the blocks that a message fills
BASELINE = "text"


class Task(NamedTuple):
    """One task; `max_tokens` of an answer."""

    name: str
    make: Callable[[int, int], list[Problem]]
    max_tokens: int


TASKS = (
    Task("key-value look-up, 4 documents", key_values, 8),
    Task("facts in sentences, 4 documents", sentence_facts, 8),
    Task("two facts of 3 documents", fact_pairs, 20),
    Task("merge two lists (coverage)", list_pairs, 60),
    Task("a number in reports, 4 documents", reports, 8),
)


class Way(NamedTuple):
    """How prompts are run: the session's mode, the context of modules, whether scaffolds count."""

    name: str
    mode: str
    context: str
    has_scaffolds: bool


WAYS = (
    Way(BASELINE, "baseline", "modules", False),
    Way("cached", "choreo", "modules", False),
    Way("cached behind the instruction", "choreo", "schema", False),
    Way("cached, scaffold", "choreo", "modules", True),
    Way("exact", "exact", "modules", False),
)


def measure(llm: Any, num: int) -> list[dict[str, Any]]:
    """One row for each task and way."""
    return [row for task in TASKS for row in _measure_task(llm, task, num)]


def measure_file(llm: Any, path: Path, num: int, max_tokens: int) -> list[dict[str, Any]]:
    """One row for each way, on questions of a file about documents of its own.

    Rows whose documents do not fit into the context are left out, and how many is said.

    Raises:
        SystemExit: no row of the file has documents that fit.
    """
    tokenizer = llm.get_tokenizer()
    room = llm.model_config.max_model_len - max_tokens
    found = [problem for problem in load_jsonl(path) if problem.documents]
    fit = [p for p in found if _num_tokens(tokenizer, p) <= room][:num]
    print(f"{path.name}: {len(fit)} questions, {len(found)} with documents", flush=True)
    if not fit:
        raise SystemExit(f"{path} has no questions whose documents fit into {room} tokens")
    task = Task(path.stem, lambda count, seed: list(fit), max_tokens)
    return _measure_task(llm, task, len(fit))


def _num_tokens(tokenizer: Any, problem: Problem) -> int:
    """Tokens of a question and its documents, with room for turns and whole blocks."""
    texts = [problem.question, *problem.documents]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) + _ROOM for text in texts)


def _measure_task(llm: Any, task: Task, num: int) -> list[dict[str, Any]]:
    problems = task.make(num, SEED)
    scores: dict[str, list[float]] = {}
    rows = []
    for way in WAYS:
        texts = _answers(llm, problems, way, task.max_tokens)
        scores[way.name] = [_score(p, text) for p, text in zip(problems, texts, strict=True)]
        rows.append({"task": task.name, "way": way.name, **_numbers(scores, way.name, problems)})
        print(rows[-1], flush=True)
    return rows


def _answers(llm: Any, problems: Sequence[Problem], way: Way, max_tokens: int) -> list[str]:
    from vllm import SamplingParams

    from vllm_choreo import Choreography
    from vllm_choreo.pml import PromptCache

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with Choreography(llm, mode=way.mode) as c:
        cache = PromptCache(c, llm.get_tokenizer())
        prompts = []
        for number, problem in enumerate(problems):
            schema = problem_schema(problem, f"p{number}")
            if not way.has_scaffolds:
                schema = without_scaffolds(schema)
            cache.register(schema, context=way.context)
            prompts.append(problem_prompt(problem, f"p{number}"))
        return [answer.text for answer in cache.decode(prompts, sampling_params=greedy)]


def _score(problem: Problem, text: str) -> float:
    if problem.kind == "concepts":
        return coverage(text, problem.answers)
    return float(is_correct(problem.kind, text, problem.answers))


def _numbers(
    scores: dict[str, list[float]], way: str, problems: Sequence[Problem]
) -> dict[str, Any]:
    """The score, its difference from the text's, each with its interval, and McNemar's p."""
    found, base = scores[way], scores[BASELINE]
    less = [a - b for a, b in zip(found, base, strict=True)]
    is_share = problems[0].kind != "concepts"
    low, high = (
        wilson_interval(int(sum(found)), len(found))
        if is_share
        else bootstrap_interval(found, statistics.fmean)
    )
    less_low, less_high = bootstrap_interval(less, statistics.fmean)
    worse, better = sum(d < 0 for d in less), sum(d > 0 for d in less)
    return {
        "n": len(found),
        "score": round(statistics.fmean(found), 4),
        "score_low": round(low, 4),
        "score_high": round(high, 4),
        "difference": round(statistics.fmean(less), 4),
        "difference_low": round(less_low, 4),
        "difference_high": round(less_high, 4),
        "p": round(mcnemar(worse, better), 5) if is_share else "",
    }
