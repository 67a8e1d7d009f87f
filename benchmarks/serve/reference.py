# SPDX-License-Identifier: Apache-2.0
"""What one engine answers to the same sessions, as text and as messages: what fleets must answer.

Turns of all sessions that come at a time go to the engine as one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.serve.workload import Session, Transcript, Turn

# What was generated in each turn of each session.
Answers = list[list[tuple[int, ...]]]


def reference(
    model: str, options: Mapping[str, Any], work: Sequence[Session]
) -> tuple[Answers, Answers]:
    """Answers of one engine, in a process of its own: to text, and over messages."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_answers, model, dict(options), list(work)).result()


def _answers(model: str, options: dict[str, Any], work: list[Session]) -> tuple[Answers, Answers]:
    from vllm import LLM

    llm = LLM(model, **options)
    try:
        return _of_text(llm, work), _of_messages(llm, work)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _batches(work: Sequence[Session]) -> Iterator[list[tuple[int, Turn]]]:
    """Turns, by the number of their session, that ask for as many tokens and may run at a time."""
    for number in range(max(len(session.turns) for session in work)):
        batch: dict[int, list[tuple[int, Turn]]] = {}
        for at, session in enumerate(work):
            if number < len(session.turns):
                turn = session.turns[number]
                batch.setdefault(turn.num_tokens, []).append((at, turn))
        yield from batch.values()


def _params(batch: list[tuple[int, Turn]]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=batch[0][1].num_tokens, ignore_eos=True)


def _of_text(llm: Any, work: Sequence[Session]) -> Answers:
    answers: Answers = [[] for _ in work]
    transcripts = [Transcript() for _ in work]
    for batch in _batches(work):
        prompts = [{"prompt_token_ids": list(transcripts[at].prompt(turn))} for at, turn in batch]
        outputs = llm.generate(prompts, _params(batch), use_tqdm=False)
        for (at, turn), output in zip(batch, outputs, strict=True):
            generated = tuple(output.outputs[0].token_ids)
            transcripts[at].answer(turn, generated)
            answers[at].append(generated)
    return answers


def _of_messages(llm: Any, work: Sequence[Session]) -> Answers:
    from vllm_choreo import Choreography

    answers: Answers = [[] for _ in work]
    with Choreography(llm) as c:
        for batch in _batches(work):
            given = [
                {"tokens": list(ids), "save_as": f"{at}-{name}"}
                for at, turn in batch
                for name, ids in turn.given.items()
            ]
            if given:
                c.prefill(given)
            calls = [
                {
                    "header": list(turn.header),
                    "parents": [f"{at}-{name}" for name in turn.reads],
                    "save_as": f"{at}-{turn.name}",
                }
                for at, turn in batch
            ]
            found = c.decode(calls, sampling_params=_params(batch))
            for (at, _), message in zip(batch, found, strict=True):
                answers[at].append(tuple(message.generated_token_ids))
    return answers
