# SPDX-License-Identifier: Apache-2.0
"""The laws of choreography (docs/design.md), as measurements on a running engine.

A law says that two ways to the same answer agree. Each function here goes both ways and yields, for
every pair of answers, the largest difference of their log-probabilities: infinite if the sampled
tokens differ, if one is no number, or if a claim that comes with the law does not hold. In float32
all of them are below `LOGPROB_TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_choreo import Call, Choreography
from vllm_choreo.semantics.message import Message, TokenLogprob
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.testing.reference import Made, Reference, num_unlike_greedy

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput

    Sampled: TypeAlias = Message | CompletionOutput

# Largest difference in log-probability between two ways in float32. Measured on the tiny models: at
# most 6e-5; the rest is room for kernels of other instruction sets.
LOGPROB_TOLERANCE = 5e-4
_NUM_LOGPROBS = 5
_FIRST_TOKEN_ID = 20  # below are special tokens


@dataclass(frozen=True)
class Subject:
    """An engine whose laws are measured, in this process and in float32.

    Attributes:
        llm: the engine.
        vocab_size: tokens are drawn below it.
    """

    llm: LLM
    vocab_size: int

    def tokens(self, num_tokens: int, seed: int) -> list[int]:
        """Draw token ids."""
        import torch

        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(_FIRST_TOKEN_ID, self.vocab_size, (num_tokens,), generator=drawn)
        return [int(token_id) for token_id in ids]

    def ordinary(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 4
    ) -> list[CompletionOutput]:
        """Run plain requests of vLLM's on these tokens."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, greedy(max_tokens), use_tqdm=False)
        return [output.outputs[0] for output in outputs]


def greedy(max_tokens: int = 4) -> SamplingParams:
    """Sampling parameters of all answers: the likeliest tokens, with log-probabilities."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=_NUM_LOGPROBS
    )


def difference(left: Sampled, right: Sampled) -> float:
    """Largest difference of the log-probabilities of two answers; infinite if tokens differ."""
    if _token_ids(left) != _token_ids(right):
        return math.inf
    found = [0.0]
    for a, b in zip(_logprobs(left), _logprobs(right), strict=True):
        # The fifth and sixth best may change places; at least the four best are in both.
        common = a.keys() & b.keys()
        if len(common) < _NUM_LOGPROBS - 1:
            return math.inf
        found += [abs(a[t].logprob - b[t].logprob) for t in common]
    return largest(found)


def largest(differences: Iterable[float]) -> float:
    """Largest of some differences; infinite if one of them is no number, or there are none."""
    found = list(differences)
    return math.inf if not found or any(map(math.isnan, found)) else max(found)


def _token_ids(answer: Sampled) -> tuple[int, ...]:
    return tuple(answer.generated_token_ids if isinstance(answer, Message) else answer.token_ids)


def _logprobs(answer: Sampled) -> Sequence[Mapping[int, TokenLogprob]]:
    assert answer.logprobs is not None, "all answers are asked for with log-probabilities"
    return answer.logprobs


def _claimed(holds: bool) -> float:
    """Difference of a claim: none, or infinite."""
    return 0.0 if holds else math.inf


def chain(subject: Subject) -> Iterator[float]:
    """The whole history as parents: as an ordinary request on the concatenated text."""
    # The third message is decoded, so that the last one reads sampled tokens, the last included.
    lengths = (33, 7, 12, 20)
    pieces = [subject.tokens(length, seed) for seed, length in enumerate(lengths)]
    with Choreography(subject.llm) as c:
        first = c.prefill(pieces[0])
        second = c.prefill(pieces[1], parents=[first])
        third = c.decode(pieces[2], parents=[first, second], sampling_params=greedy())
        last = c.decode(pieces[3], parents=[first, second, third], sampling_params=greedy())
        yield _claimed(all(message.usage.exact for message in (first, second, third, last)))
        text = pieces[0] + pieces[1] + pieces[2]
        (ordinary,) = subject.ordinary([text])
        yield difference(third, ordinary)
        (ordinary,) = subject.ordinary([text + list(ordinary.token_ids) + pieces[3]])
        yield difference(last, ordinary)


def shift(subject: Subject) -> Iterator[float]:
    """All positions of a call moved along: the same answer, and the same for those who read it."""
    with Choreography(subject.llm) as c:
        first, second = c.prefill(
            [{"tokens": subject.tokens(40, 1)}, {"tokens": subject.tokens(30, 2), "new_offset": 9}]
        )
        here, there = c.decode(
            [
                {
                    "header": subject.tokens(10, 3),
                    "parents": [first, (second, 5, 30)],
                    "offsets": [25 + shift, 3 + shift],
                    "new_offset": 50 + shift,
                    "sampling_params": greedy(),
                }
                for shift in (0, 613)
            ]
        )
        yield difference(here, there)
        # What they wrote is the same too, wherever it was written.
        header = subject.tokens(5, 4)
        one, other = c.decode(
            [
                {
                    "header": header,
                    "parents": [parent],
                    "offsets": [0],
                    "new_offset": 40,
                    "sampling_params": greedy(),
                }
                for parent in (here, there)
            ]
        )
        yield difference(one, other)


def permutation(subject: Subject) -> Iterator[float]:
    """Parents listed in another order, at the same positions: the same answer."""
    with Choreography(subject.llm) as c:
        parents = [c.prefill(subject.tokens(length, length)) for length in (35, 64, 20)]
        offsets = [80, 0, 150]
        first, *others = (
            c.decode(
                subject.tokens(12, 5),
                parents=[parents[i] for i in order],
                offsets=[offsets[i] for i in order],
                new_offset=110,
                sampling_params=greedy(),
            )
            for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2])
        )
        for other in others:
            yield difference(first, other)


def isolation(subject: Subject) -> Iterator[float]:
    """Calls, and ordinary requests, of one batch: as each of them alone."""
    prompts = [subject.tokens(70, 30), subject.tokens(3, 31)]
    alone = [subject.ordinary([prompt])[0] for prompt in prompts]
    with Choreography(subject.llm) as c:
        parents = c.prefill([{"tokens": subject.tokens(n, n)} for n in (50, 33)])
        calls = _isolated_calls(subject, parents)
        single = [c.decode([call])[0] for call in calls]
        for left, right in zip(single, c.decode(calls), strict=True):
            yield difference(left, right)
        # The prefix cache would otherwise spare the ordinary requests their prefill in the batch.
        subject.llm.reset_prefix_cache()
        requests = [_as_request(call, c) for call in calls]
        for position, prompt in zip((1, 3), prompts, strict=True):
            requests.insert(position, ({"prompt_token_ids": prompt}, greedy()))
        inputs, params = zip(*requests, strict=True)
        outputs = subject.llm.generate(list(inputs), list(params), use_tqdm=False)
        mixed = [output.outputs[0] for output in outputs]
        expected: list[Sampled] = list(single)
        for position, answer in zip((1, 3), alone, strict=True):
            expected.insert(position, answer)
        for wanted, found in zip(expected, mixed, strict=True):
            yield difference(wanted, found)


def _isolated_calls(subject: Subject, parents: Sequence[Message]) -> list[Any]:
    first, second = parents
    places: list[tuple[list[Message], list[int] | None]] = [
        ([first, second], None),
        ([second, first], None),
        ([first], [300]),
        ([], None),
    ]
    return [
        {
            "header": subject.tokens(5 + 30 * index, 10 + index),
            "parents": named,
            **({} if offsets is None else {"offsets": offsets}),
            "sampling_params": greedy(3 + index),
        }
        for index, (named, offsets) in enumerate(places)
    ]


def _as_request(call: Mapping[str, Any], c: Choreography) -> tuple[Any, SamplingParams]:
    """Make of a call a request for `LLM.generate`, beside ordinary ones."""
    params = ChoreoParams(
        parents=tuple(ParentSpan(parent.id) for parent in call["parents"]),
        offsets=call.get("offsets"),
        session=c.session,
    )
    return {"prompt_token_ids": call["header"]}, params.apply(call["sampling_params"])


def eviction(subject: Subject) -> Iterator[float]:
    """Parents that were evicted, with their own parents: the same answer."""
    with Choreography(subject.llm) as c:
        document = c.prefill(subject.tokens(70, 50))
        notes = c.decode(
            subject.tokens(9, 51), parents=[document], new_offset=200, sampling_params=greedy()
        )
        call: Call = {
            "header": subject.tokens(6, 52),
            "parents": [notes, (document, 10, 60)],
            "sampling_params": greedy(),
        }
        (before,) = c.decode([call])
        free_blocks = c.stats()["num_free_blocks"]
        c.evict(document, notes)
        yield _claimed(c.stats()["num_free_blocks"] > free_blocks)
        yield difference(before, c.decode([call])[0])
        # And a message whose own parents are gone as well.
        c.evict(document, notes, before)
        again: Call = {
            "header": subject.tokens(3, 53),
            "parents": [before],
            "offsets": [40],
            "sampling_params": greedy(),
        }
        (answer,) = c.decode([again])
        c.evict(before)
        yield difference(answer, c.decode([again])[0])


def split(subject: Subject, at: int = 32) -> Iterator[float]:
    """A text as one message, or as two of which the second reads the first: the same answer.

    Args:
        at: number of tokens of the first of the two.
    """
    text, header = subject.tokens(60, 60), subject.tokens(8, 61)
    with Choreography(subject.llm) as c:
        context = c.prefill(subject.tokens(20, 62))
        whole_text = c.prefill(text, parents=[context], offsets=[100], new_offset=30)
        x = c.prefill(text[:at], parents=[context], offsets=[100], new_offset=30)
        y = c.prefill(text[at:], parents=[context, x], offsets=[100, 30], new_offset=30 + at)
        place: Call = {"header": header, "new_offset": 150, "sampling_params": greedy()}
        (together,) = c.decode([{**place, "parents": [whole_text], "offsets": [70]}])
        (apart,) = c.decode([{**place, "parents": [x, y], "offsets": [70, 70 + at]}])
        yield difference(together, apart)


def oracle(subject: Subject, reference: Reference) -> Iterator[float]:
    """Two calls as HuggingFace computes them, densely.

    They reorder, repeat, take a part, leave a gap, overlap, and read a parent to the right.
    """
    tokens = [subject.tokens(length, 70 + length) for length in (33, 21, 11)]
    with Choreography(subject.llm) as c:
        a = c.prefill(tokens[0])
        b = c.decode(tokens[1], parents=[a], new_offset=90, sampling_params=greedy())
        answer = c.decode(
            tokens[2],
            parents=[a, b, (a, 5, 30), b],
            offsets=[60, 0, 64, 400],
            new_offset=130,
            sampling_params=greedy(6),
        )
    made_a = Made(tokens[0])
    made_b = Made(b.token_ids, ((made_a, 0, 33, 0),), 90)
    seen = ((made_a, 0, 33, 60), (made_b, 0, b.num_tokens, 0), (made_a, 5, 30, 64))
    made = Made(answer.token_ids, (*seen, (made_b, 0, b.num_tokens, 400)), 130)
    yield _distance(b, made_b, reference)
    yield _distance(answer, made, reference)
    yield _claimed(not answer.usage.exact)


def _distance(answer: Message, made: Made, reference: Reference) -> float:
    """Largest difference between an answer's log-probabilities and the reference's."""
    logits, generated = reference.logits(made), answer.generated_token_ids
    num_given = answer.num_tokens - len(generated)
    if num_unlike_greedy(logits, num_given, generated):
        return math.inf
    rows = logits[num_given - 1 :].log_softmax(-1)
    return largest(
        abs(float(rows[i, token_id]) - entry.logprob)
        for i, entries in enumerate(_logprobs(answer))
        for token_id, entry in entries.items()
    )


# All but the oracle law, which needs a reference, too.
LAWS: dict[str, Callable[[Subject], Iterator[float]]] = {
    "chain": chain,
    "shift": shift,
    "permutation": permutation,
    "isolation": isolation,
    "eviction": eviction,
    "split": split,
}
