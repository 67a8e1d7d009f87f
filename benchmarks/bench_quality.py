# SPDX-License-Identifier: Apache-2.0
"""What choreography costs in answers: tasks that the small model can do, and next-token agreement.

    python -m benchmarks.bench_quality [--limit 100] [--questions 24] [--data FILE]

Greedy decoding, so both sides of a comparison answer the same problems without any chance. The
tasks are made from seeds; their documents are messages of their own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import agreement
from benchmarks.common import command_line, machine, set_environment, start_engine, write_csv
from benchmarks.quality_page import (
    ALONE,
    BASELINE,
    CHOREO,
    EXACT,
    NO_DOCUMENTS,
    WITHOUT_NOTE,
    section,
)
from benchmarks.stats import bootstrap_interval, wilson_interval
from vllm_choreo.workflows.chat import assistant, system, user
from vllm_choreo.workflows.problems import (
    Problem,
    fact_pairs,
    key_values,
    list_pairs,
    load_jsonl,
    sentence_facts,
    word_problems,
)
from vllm_choreo.workflows.problems.grading import coverage, is_correct

SEED = 1
INSTRUCTION = "Answer from the given facts."


class Task(NamedTuple):
    """One task.

    `max_tokens`: of an answer; none has room to name everything that was read, unless it is asked
    for. `guess`: the score of one who read the documents and picks at random; None: of no meaning.
    """

    name: str
    make: Callable[[int, int], list[Problem]]
    max_tokens: int
    guess: float | None


TASKS = (
    Task("key-value look-up, 4 documents", key_values, 8, 1 / 4),
    Task("facts in sentences, 4 documents", sentence_facts, 8, 1 / 4),
    Task("two facts of 3 documents", fact_pairs, 20, 1 / 6),
    Task("merge two lists (coverage)", list_pairs, 60, None),
)


class Way(NamedTuple):
    """How documents reach the reader.

    `context`: what each is encoded with in mode "choreo": "instruction", "nothing", or "note": the
    instruction and a message that the reader does not read; or there are "no documents".
    """

    name: str
    mode: str
    context: str


WAYS = (
    Way(BASELINE, BASELINE, "instruction"),
    Way(EXACT, EXACT, "instruction"),
    Way(CHOREO, CHOREO, "instruction"),
    Way(ALONE, CHOREO, "nothing"),
    Way(NO_DOCUMENTS, BASELINE, "no documents"),
)
MODES = (BASELINE, EXACT, CHOREO)


class Probe(NamedTuple):
    """The answers to each problem, and the log-probability of a note's number as the answer."""

    texts: list[str]
    log_probabilities: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=100, help="problems of each task")
    parser.add_argument("--questions", type=int, default=24, help="of the debates")
    parser.add_argument("--data", help="JSON lines with the debates' questions; default: generated")
    args = parser.parse_args()
    if args.limit < 3:
        parser.error("--limit must be at least 3: notes take the numbers of other problems")
    set_environment()
    import vllm_choreo

    vllm_choreo.register()
    llm = start_engine(**agreement.ENGINE_OPTIONS)
    record = {**machine(), "command": command_line("bench_quality")}
    rows = [row for task in TASKS for row in _measure(llm, task, args.limit)]
    write_csv("quality_tasks", rows, **record)
    write_csv("quality_leakage", _measure_leakage(llm, args.limit), **record)
    if args.questions:
        if args.data:
            problems = load_jsonl(args.data, args.questions)
        else:
            problems = word_problems(args.questions, SEED)
        debates = agreement.measure(llm, [problem.question for problem in problems])
        write_csv("quality_agreement", debates, **record)
    print(section())
    return 0


# -- measuring -----------------------------------------------------------------------------------


def _measure(llm: Any, task: Task, num: int) -> list[dict[str, Any]]:
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


def _measure_leakage(llm: Any, num: int) -> list[dict[str, Any]]:
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


def score(problem: Problem, text: str) -> float:
    """1 or 0; of a list, the fraction of it that the text holds."""
    if problem.kind == "concepts":
        return coverage(text, problem.answers)
    return float(is_correct(problem.kind, text, problem.answers))


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


if __name__ == "__main__":
    sys.exit(main())
