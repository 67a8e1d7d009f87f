# SPDX-License-Identifier: Apache-2.0
"""What an engine's answers are held to: in float32 the laws, in 16 bits HuggingFace.

In 16 bits the engine's own rounding is not ours to judge. It is measured on ordinary requests, and
choreographed calls may differ by 2.5 times as much: one more rotation and a parent's own error (see
`tests/engine/test_bfloat16.py`, which derives it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_choreo import Choreography
from vllm_choreo.testing import laws
from vllm_choreo.testing.laws import LOGPROB_TOLERANCE, Subject, greedy, largest
from vllm_choreo.testing.models.tiny import VOCAB_SIZE
from vllm_choreo.testing.reference import Made, Reference

if TYPE_CHECKING:
    from vllm import LLM

_NOISE_FACTOR = 2.5
_LENGTHS = (1, 20, 33, 64, 90, 130, 200)


def differences(llm: LLM, model: str, names: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Measure an engine's answers.

    Args:
        model: folder of its model.
        names: laws that are measured; none if it computes in 16 bits.

    Yields:
        What was measured, the largest difference of log-probabilities, and how much it may be.
    """
    subject, reference = Subject(llm, VOCAB_SIZE), Reference(model)
    if not names:
        yield from _in_16_bits(subject, reference)
    of_engine: dict[str, Callable[[Subject], Iterator[float]]]
    of_engine = {**laws.LAWS, "oracle": partial(laws.oracle, reference=reference), "kept": _kept}
    for name in names:
        found = of_engine[name](subject)
        yield name, largest(found), LOGPROB_TOLERANCE


def _kept(subject: Subject) -> Iterator[float]:
    """What nothing came before is the same, repaired by layers from what was kept of it."""
    given, asked = subject.tokens(20, 400), subject.tokens(5, 401)
    with Choreography(subject.llm) as c:
        heard = c.decode(given, sampling_params=greedy(20), keep_hidden=[1])
        as_it_is, by_layers = (
            c.decode(asked, parents=[heard], sampling_params=greedy(), layers=layers)
            for layers in (None, (1, 3))
        )
        yield laws.difference(as_it_is, by_layers)


def _in_16_bits(subject: Subject, reference: Reference) -> Iterator[tuple[str, float, float]]:
    for parameter in reference._model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    prompts = [subject.tokens(length, length) for length in _LENGTHS]
    noise = largest(
        _distance(reference.text_logits([*prompt, *found.token_ids]), len(prompt), found)
        for prompt, found in zip(prompts, subject.ordinary(prompts, 8), strict=True)
    )
    yield "ordinary requests", noise, 0.5  # far from where answers are no longer the model's
    with Choreography(subject.llm) as c:
        texts = [subject.tokens(length, 300 + length) for length in (40, 33)]
        documents, made = [c.prefill(text) for text in texts], [Made(text) for text in texts]
        calls: list[Any] = []
        seen = []
        for num_header, places in ((2, (0, 60)), (5, (31, 31)), (150, (100, 7))):
            header = subject.tokens(num_header, num_header)
            offsets = {"offsets": list(places), "new_offset": 150}
            calls.append({"header": header, "parents": documents, **offsets})
            seen.append(
                tuple((m, 0, len(m.token_ids), at) for m, at in zip(made, places, strict=True))
            )
        answers = c.decode(calls, sampling_params=greedy(8))
        worst = largest(
            _distance(
                reference.logits(Made(answer.token_ids, parents, 150)),
                answer.num_tokens - len(answer.generated_token_ids),
                answer,
            )
            for answer, parents in zip(answers, seen, strict=True)
        )
    yield "calls with many readers", worst, _NOISE_FACTOR * noise


def _distance(logits: Any, num_given: int, answer: Any) -> float:
    """Largest difference between reported log-probabilities and those of logits."""
    rows = logits[num_given - 1 :].log_softmax(-1)
    return largest(
        abs(float(rows[i, token_id]) - entry.logprob)
        for i, entries in enumerate(answer.logprobs)
        for token_id, entry in entries.items()
    )
