# SPDX-License-Identifier: Apache-2.0
"""Answers on all ways, scored; and whether a note comes through that their reader does not read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.quality import agreement
from benchmarks.quality.tasks import (
    BASELINE,
    CHOREO,
    MODES,
    TASKS,
    WAYS,
    WITHOUT_NOTE,
    Task,
    Way,
    score,
)
from vllm_choreo.lab.problems import Problem, key_values
from vllm_choreo.lab.study.stats import bootstrap_interval, wilson_interval
from vllm_choreo.lab.workflows.chat import assistant, system, user

SEED = 1
INSTRUCTION = "Answer from the given facts."


class Probe(NamedTuple):
    """The answers to each problem, and the log-probability of a note's number as the answer."""

    texts: list[str]
    log_probabilities: list[float]


def measure_task(llm: Any, task: Task, num: int) -> list[dict[str, Any]]:
    """One row per way: score with its interval, and its difference from the baseline's."""
    problems = task.make(num, SEED)
    rows, texts, scores = [], {}, {}
    for way in WAYS:
        texts[way.name] = _answers(llm, task, problems, way)
        scores[way.name] = _scores(problems, texts[way.name])
        found, base = scores[way.name], scores[BASELINE]
        less = [a - b for a, b in zip(found, base, strict=True)]
        same = [a == b for a, b in zip(texts[way.name], texts[BASELINE], strict=True)]
        rows.append(
            {
                "task": task.name,
                "guess": "" if task.guess is None else round(task.guess, 3),
                "way": way.name,
                **_score_with_interval(problems, found),
                **_named("difference", statistics.fmean(less), _mean_interval(less)),
                "same_texts": sum(same),
            }
        )
        print({key: rows[-1][key] for key in ("task", "way", "n", "score")}, flush=True)
    return rows


def measure_leakage(llm: Any, num: int) -> list[dict[str, Any]]:
    """Whether a note that only the documents read comes through to their reader."""
    problems = key_values(num, SEED)
    # What the note says, and what another one says as a control: numbers of other problems.
    noted, other = ([p.answers[0] for p in problems[k:] + problems[:k]] for k in (1, 2))
    plain = _probe(llm, CHOREO, problems, None, noted)
    rows = [_leak_row(WITHOUT_NOTE, problems, noted, plain, plain, None)]
    for mode in MODES:
        found = _probe(llm, mode, problems, noted, noted)
        control = _probe(llm, mode, problems, other, noted)
        rows.append(_leak_row(mode, problems, noted, found, plain, control))
        print({key: rows[-1][key] for key in ("way", "n", "score", "note", "gain")}, flush=True)
    return rows


def _leak_row(
    way: str,
    problems: Sequence[Problem],
    noted: Sequence[str],
    found: Probe,
    plain: Probe,
    control: Probe | None,
) -> dict[str, Any]:
    """Scores; their difference from those without a note; how often the note's number is said; what
    the note adds to its log-probability, against a note with another number.
    """
    scores, base = (_scores(problems, probe.texts) for probe in (found, plain))
    less = [a - b for a, b in zip(scores, base, strict=True)]
    said = sum(number in text for number, text in zip(noted, found.texts, strict=True))
    row = {
        "way": way,
        **_score_with_interval(problems, scores),
        **_named("difference", statistics.fmean(less), _mean_interval(less)),
        **_named("note", said / len(noted), wilson_interval(said, len(noted))),
        "notes": said,
    }
    if control is None:
        return row
    pairs = zip(found.log_probabilities, control.log_probabilities, strict=True)
    gain = [a - b for a, b in pairs]
    return {**row, **_named("gain", statistics.fmean(gain), _mean_interval(gain))}


def _probe(
    llm: Any,
    mode: str,
    problems: Sequence[Problem],
    notes: Sequence[str] | None,
    numbers: Sequence[str],
) -> Probe:
    """Answers, and the log-probability of `numbers`, after documents that have read `notes`."""
    from vllm_choreo import Choreography

    with Choreography(llm, mode=mode) as c:
        if notes is None:
            read = _encoded(c, problems, "instruction")
        else:
            texts = [f"{p.opening} {note}" for p, note in zip(problems, notes, strict=True)]
            read = _encoded(c, problems, "note", texts)
        calls = _calls(problems, read)
        likely = _log_probabilities(llm, c, calls, [f" {number}" for number in numbers])
        return Probe(_texts(c, calls, TASKS[0].max_tokens), likely)


def _answers(llm: Any, task: Task, problems: Sequence[Problem], way: Way) -> list[str]:
    """What the model says to each problem."""
    from vllm_choreo import Choreography

    with Choreography(llm, mode=way.mode) as c:
        return _texts(c, _calls(problems, _encoded(c, problems, way.context)), task.max_tokens)


def _encoded(
    c: Any, problems: Sequence[Problem], context: str, notes: Sequence[str] = ()
) -> list[list[Any]]:
    """The messages that the reader of each problem reads: the instruction and the documents."""
    instruction = c.prefill(system(INSTRUCTION))
    read = [[instruction] for _ in problems]
    if context == "no documents":
        return read
    seen: list[list[Any]] = [[] if context == "nothing" else [instruction] for _ in problems]
    if context == "note":
        written = c.prefill([{"tokens": user(note), "parents": [instruction]} for note in notes])
        for messages, note in zip(seen, written, strict=True):
            messages.append(note)
    for j in range(len(problems[0].documents)):
        calls = [
            {"tokens": user(problem.documents[j]), "parents": parents}
            for problem, parents in zip(problems, seen, strict=True)
        ]
        for messages, document in zip(read, c.prefill(calls), strict=True):
            messages.append(document)
    return read


def _calls(problems: Sequence[Problem], read: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The question of each problem, and what is read before it."""
    return [
        {"header": user(problem.question) + assistant(problem.opening), "parents": parents}
        for problem, parents in zip(problems, read, strict=True)
    ]


def _texts(c: Any, calls: Sequence[dict[str, Any]], max_tokens: int) -> list[str]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [message.generated_text for message in c.decode(calls, sampling_params=params)]


def _log_probabilities(
    llm: Any, c: Any, calls: Sequence[dict[str, Any]], texts: Sequence[str]
) -> list[float]:
    """The natural log-probability of each text as the answer of a call."""
    tokenizer = llm.get_tokenizer()
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    forcing = [
        {**call, "sampling_params": agreement.forcing(ids, logprobs=0)}
        for call, ids in zip(calls, tokens, strict=True)
    ]
    return [
        math.fsum(at[token].logprob for at, token in zip(message.logprobs, ids, strict=True))
        for message, ids in zip(c.decode(forcing), tokens, strict=True)
    ]


def _scores(problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
    return [score(problem, text) for problem, text in zip(problems, texts, strict=True)]


def _score_with_interval(problems: Sequence[Problem], scores: Sequence[float]) -> dict[str, Any]:
    """Wilson's interval of a share of right answers, the bootstrap's of a mean coverage."""
    if problems[0].kind == "concepts":
        interval = _mean_interval(scores)
    else:
        interval = wilson_interval(int(sum(scores)), len(scores))
    return {"n": len(scores), **_named("score", statistics.fmean(scores), interval)}


def _mean_interval(values: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval(values, statistics.fmean)


def _named(name: str, value: float, interval: tuple[float, float]) -> dict[str, float]:
    low, high = interval
    return {name: round(value, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}
