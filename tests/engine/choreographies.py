# SPDX-License-Identifier: Apache-2.0
"""Seeded random choreographies, their run through the public API, and the check by the oracle.

A choreography is a list of batches; a batch is a list of calls of one kind that run in parallel.
Calls name messages by their number in order of creation. Lengths of decoded messages are known
only when they have run, so sub-spans are kept as fractions and gaps as differences; both become
numbers when the call is made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import SamplingParams

from tests.engine.oracle import Encoded, Oracle, Parent
from vllm_choreo import Choreography
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.laws import LOGPROB_TOLERANCE as LOGPROB_TOLERANCE
from vllm_choreo.testing.models.tiny import EOS_TOKEN_ID

# Where the oracle's two best tokens are closer than this, either may be chosen.
TIE_MARGIN = 1e-3
# Lengths around the block size of 32 are drawn more often: there the padding changes.
_BOUNDARY_LENGTHS = (1, 31, 32, 33, 63, 64, 65)


@dataclass(frozen=True)
class Draw:
    """How large choreographies are, and from which tokens.

    Attributes:
        has_parts: whether parents may be parts of messages.
        max_parents: the most that a call has, unless it goes on behind another one.
        max_offset: the last place at which messages are put.
    """

    num_batches: int = 4
    max_tokens: int = 12
    max_length: int = 70
    token_ids: tuple[int, int] = (3, 511)
    has_parts: bool = True
    max_parents: int = 4
    max_offset: int = 1500


@dataclass(frozen=True)
class PlannedParent:
    """Message `number`, whole or the part between two fractions of its length."""

    number: int
    part: tuple[float, float] | None = None


@dataclass(frozen=True)
class PlannedCall:
    """One call before it is run.

    Attributes:
        tokens: the new tokens, or the header.
        parents: in the order in which they are listed.
        placement: how offsets come about: "omitted"; "gaps": each parent begins `numbers[j]`
            tokens after (or, if negative, before) the end of the one listed before it;
            "absolute": at `numbers[j]`.
        numbers: one per parent, then one for the new tokens; empty if all are omitted.
        give_new_offset: whether `new_offset` is given, or left out for its default.
        continues: the number of a message whose own context, then itself, are the parents; then
            `parents` is empty and all offsets are given explicitly.
        sampling_params: None for a prefill.
        pictures: a picture for each placeholder among the tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[PlannedParent, ...] = ()
    placement: str = "omitted"
    numbers: tuple[int, ...] = ()
    give_new_offset: bool = False
    continues: int | None = None
    sampling_params: SamplingParams | None = None
    pictures: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ran:
    """A call that has run: every number resolved.

    Attributes:
        call: the plan.
        message: what the API returned.
        spans: `(number, start, stop)` of every parent.
        offsets: where each parent is seen, defaults filled in by this module.
        new_offset: likewise.
        num_positions: positions that the message takes; None: one for each token.
    """

    call: PlannedCall
    message: Message
    spans: tuple[tuple[int, int, int], ...]
    offsets: tuple[int, ...]
    new_offset: int
    num_positions: int | None = None

    @property
    def extent(self) -> int:
        """Positions that the message takes."""
        return self.message.num_tokens if self.num_positions is None else self.num_positions


# -- drawing --------------------------------------------------------------------------------------


def draw_choreography(seed: int, draw: Draw | None = None) -> list[list[PlannedCall]]:
    """A random choreography; the same seed gives the same one.

    Its last batch decodes after every message that no decode has read yet, so that no encoding
    goes unchecked.
    """
    draw = draw or Draw()
    rng = random.Random(seed)
    batches: list[list[PlannedCall]] = []
    num_messages = 0
    unread: set[int] = set()
    for index in range(draw.num_batches):
        is_decode = index > 0 and rng.random() < 0.6
        batch = [
            _draw_call(rng, draw, num_messages, is_decode) for _ in range(rng.choice((1, 2, 3, 4)))
        ]
        batches.append(batch)
        if is_decode:
            unread -= {parent.number for call in batch for parent in call.parents}
        unread |= set(range(num_messages, num_messages + len(batch)))
        num_messages += len(batch)
    remaining = sorted(unread)
    rng.shuffle(remaining)
    size = draw.max_parents
    last = [remaining[i : i + size] for i in range(0, len(remaining), size)]
    batches.append([_draw_reader(rng, draw, [PlannedParent(n) for n in part]) for part in last])
    return batches


def _draw_call(rng: random.Random, draw: Draw, num_messages: int, is_decode: bool) -> PlannedCall:
    """One call on some of the first `num_messages` messages."""
    if num_messages and rng.random() < 0.2:
        return PlannedCall(
            _draw_tokens(rng, draw),
            continues=rng.randrange(num_messages),
            sampling_params=_draw_sampling(rng, draw) if is_decode else None,
        )
    # With replacement: one message at two offsets is legal and drawn often.
    numbers = [
        rng.randrange(num_messages)
        for _ in range(rng.randint(0, min(draw.max_parents, num_messages)))
    ]
    parents = [
        PlannedParent(number, _draw_part(rng) if draw.has_parts else None) for number in numbers
    ]
    return _draw_reader(rng, draw, parents, is_decode)


def _draw_reader(
    rng: random.Random, draw: Draw, parents: Sequence[PlannedParent], is_decode: bool = True
) -> PlannedCall:
    """A call on these parents, at random places."""
    placement = rng.choice(("omitted", "gaps", "gaps", "absolute"))
    numbers: tuple[int, ...] = ()
    if placement == "gaps":
        numbers = tuple(rng.randint(-30, 60) for _ in range(len(parents) + 1))
    elif placement == "absolute":
        numbers = tuple(rng.randint(0, draw.max_offset) for _ in range(len(parents) + 1))
    elif rng.random() < 0.3:
        numbers = (rng.randint(0, draw.max_offset),)
    return PlannedCall(
        _draw_tokens(rng, draw),
        tuple(parents),
        placement,
        numbers,
        give_new_offset=bool(numbers) and (placement == "omitted" or rng.random() < 0.7),
        sampling_params=_draw_sampling(rng, draw) if is_decode else None,
    )


def _draw_tokens(rng: random.Random, draw: Draw) -> tuple[int, ...]:
    lengths = [length for length in _BOUNDARY_LENGTHS if length <= draw.max_length]
    length = rng.choice(lengths) if rng.random() < 0.3 else rng.randint(1, draw.max_length)
    return tuple(rng.randint(*draw.token_ids) for _ in range(length))


def _draw_part(rng: random.Random) -> tuple[float, float] | None:
    if rng.random() < 0.7:
        return None
    first, second = rng.random(), rng.random()
    return min(first, second), max(first, second)


def _draw_sampling(rng: random.Random, draw: Draw) -> SamplingParams:
    """Greedy; one in four may also end at any of 60 tokens, hence often early."""
    stop = rng.sample(range(*draw.token_ids), 60) if rng.random() < 0.25 else None
    return SamplingParams(
        temperature=0.0,
        max_tokens=rng.randint(1, draw.max_tokens),
        stop_token_ids=stop,
        logprobs=5,
        detokenize=False,
    )


def side_by_side(choreographies: Sequence[list[list[PlannedCall]]]) -> list[list[PlannedCall]]:
    """Several choreographies as one: in each round the next batch of every one of them, those that
    encode as one batch, those that generate as another. None reads messages of another.
    """
    merged: list[list[PlannedCall]] = []
    numbers: list[list[int]] = [[] for _ in choreographies]  # of each one's messages, in `merged`
    num_messages = 0
    for turn in range(max(map(len, choreographies))):
        due = [
            (batches[turn], known)
            for batches, known in zip(choreographies, numbers, strict=True)
            if turn < len(batches)
        ]
        for is_decode in (False, True):
            batch: list[PlannedCall] = []
            for calls, known in due:
                if (calls[0].sampling_params is not None) != is_decode:
                    continue
                batch += [_renumbered(call, known) for call in calls]
                known += range(num_messages, num_messages + len(calls))
                num_messages += len(calls)
            if batch:
                merged.append(batch)
    return merged


def _renumbered(call: PlannedCall, numbers: Sequence[int]) -> PlannedCall:
    parents = tuple(replace(parent, number=numbers[parent.number]) for parent in call.parents)
    continues = None if call.continues is None else numbers[call.continues]
    return replace(call, parents=parents, continues=continues)


# -- running --------------------------------------------------------------------------------------


def run_choreography(
    choreography: Choreography,
    batches: list[list[PlannedCall]],
    num_positions: Callable[[Sequence[int], Sequence[Any]], int] = lambda ids, pictures: len(ids),
) -> list[Ran]:
    """Run all batches through the public API; a batch of one call is made as a single call.

    Args:
        num_positions: tells how many positions a message of these tokens and pictures takes.
    """
    done: list[Ran] = []
    for batch in batches:
        ready = [resolve_call(call, done) for call in batch]
        is_decode = batch[0].sampling_params is not None
        run = choreography.decode if is_decode else choreography.prefill
        if len(batch) == 1:
            item = dict(ready[0][0])
            messages = [run(item.pop("header" if is_decode else "tokens"), **item)]
        else:
            messages = run([item for item, *_ in ready])
        done += [
            Ran(
                *(call, message, spans, offsets, new_offset),
                num_positions(message.token_ids, call.pictures),
            )
            for call, message, (_, spans, offsets, new_offset) in zip(
                batch, messages, ready, strict=True
            )
        ]
    return done


_Resolved = tuple[
    dict[str, Any],
    tuple[tuple[int, int, int], ...],
    tuple[int, ...],
    int,
]


def resolve_call(call: PlannedCall, done: list[Ran]) -> _Resolved:
    """The arguments of the API, and the numbers that they stand for."""
    if call.continues is not None:
        spans, offsets, new_offset = _context_of(done[call.continues], call.continues)
    else:
        spans = tuple(_resolve_span(parent, done) for parent in call.parents)
        offsets, new_offset = _resolve_offsets(call, [_extent(span, done) for span in spans])
    item: dict[str, Any] = {"parents": [_api_parent(span, done) for span in spans]}
    if call.continues is not None or call.placement != "omitted":
        item["offsets"] = list(offsets)
    if call.give_new_offset:
        item["new_offset"] = new_offset
    if call.pictures:
        item["multi_modal_data"] = {"image": list(call.pictures)}
    if call.sampling_params is None:
        item["tokens"] = list(call.tokens)
    else:
        item["header"] = list(call.tokens)
        item["sampling_params"] = call.sampling_params
    return item, spans, offsets, new_offset


def _context_of(
    ran: Ran, number: int
) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...], int]:
    """The parents of message `number`, then itself where it was encoded."""
    num_tokens = ran.message.num_tokens
    spans = (*ran.spans, (number, 0, num_tokens))
    return spans, (*ran.offsets, ran.new_offset), ran.new_offset + ran.extent


def _extent(span: tuple[int, int, int], done: list[Ran]) -> int:
    """Positions that a span takes; parts hold no pictures that take another number than tokens."""
    number, start, stop = span
    is_whole = stop - start == done[number].message.num_tokens
    return done[number].extent if is_whole else stop - start


def _resolve_span(parent: PlannedParent, done: list[Ran]) -> tuple[int, int, int]:
    num_tokens = done[parent.number].message.num_tokens
    if parent.part is None:
        return parent.number, 0, num_tokens
    start = int(parent.part[0] * num_tokens)
    return parent.number, start, max(start + 1, int(parent.part[1] * num_tokens))


def _resolve_offsets(call: PlannedCall, lengths: list[int]) -> tuple[tuple[int, ...], int]:
    """Offsets and new offset by the rules of the definition."""
    ends = 0
    offsets: list[int] = []
    for index, length in enumerate(lengths):
        offset = ends
        if call.placement == "gaps":
            offset = max(0, ends + call.numbers[index])
        elif call.placement == "absolute":
            offset = call.numbers[index]
        offsets.append(offset)
        ends = offset + length
    if not call.give_new_offset:
        return tuple(offsets), ends
    number = call.numbers[-1]
    return tuple(offsets), max(0, ends + number) if call.placement == "gaps" else number


def _api_parent(span: tuple[int, int, int], done: list[Ran]) -> Any:
    number, start, stop = span
    message = done[number].message
    return message if (start, stop) == (0, message.num_tokens) else (message, start, stop)


# -- checking -------------------------------------------------------------------------------------


def check(
    choreography: Choreography,
    oracle: Oracle,
    batches: list[list[PlannedCall]],
    tolerance: float = LOGPROB_TOLERANCE,
    tie_margin: float = TIE_MARGIN,
) -> float:
    """Run `batches` and compare every message with the oracle.

    The oracle is fed the engine's tokens, so that one mismatch does not cascade into the next.

    Returns:
        The largest difference in log-probability.

    Raises:
        AssertionError: naming the call and what differed.
    """
    done = run_choreography(choreography, batches, oracle.num_positions)
    encoded: list[Encoded] = []
    exact: list[bool] = []
    worst = 0.0
    for number, ran in enumerate(done):
        parents = [
            Parent(encoded[n], offset, start, stop)
            for (n, start, stop), offset in zip(ran.spans, ran.offsets, strict=True)
        ]
        header, pictures = oracle.prompt(ran.call.tokens, ran.call.pictures)
        shown = {"pictures": pictures} if pictures else {}  # of most models the oracle takes none
        message = oracle.encode(ran.message.token_ids, parents, ran.new_offset, **shown)
        encoded.append(message)
        where = f"message {number}: {ran}"
        check_form(ran, header, where)
        exact.append(check_usage(ran, done, exact, oracle, where))
        if exact[-1] and oracle.stands_as_placed:
            check_exact(ran, done, message, oracle, where)
        if ran.call.sampling_params is not None:
            found = check_tokens(ran.message, message, len(header), tolerance, tie_margin)
            worst = max(worst, found)
    return worst


def check_form(ran: Ran, header: Sequence[int], where: str) -> None:
    """Length, position, ending: what the message says of itself."""
    message, call = ran.message, ran.call
    num_header = len(header)
    assert message.token_ids[:num_header] == tuple(header), where
    assert message.num_tokens == len(message.token_ids), where
    assert message.position == ran.new_offset, where
    generated = message.token_ids[num_header:]
    if call.sampling_params is None:
        assert not generated, where
        return
    ends = {EOS_TOKEN_ID, *(call.sampling_params.stop_token_ids or ())}
    assert not ends & set(generated[:-1]), where
    stopped = generated[-1] in ends
    assert stopped or len(generated) == call.sampling_params.max_tokens, where
    assert message.finish_reason == ("stop" if stopped else "length"), where


def check_usage(ran: Ran, done: list[Ran], exact: list[bool], oracle: Oracle, where: str) -> bool:
    """The counts, and `exact` where it is plain; returns `exact`."""
    usage = ran.message.usage
    lengths = [stop - start for _, start, stop in ran.spans]
    assert usage.reused_tokens == sum(lengths), where
    assert usage.repositioned_tokens == sum(
        length
        for length, (number, start, _), offset in zip(lengths, ran.spans, ran.offsets, strict=True)
        if done[number].new_offset + start != offset
    ), where
    if not ran.spans:
        assert usage.exact == (not oracle.scales_queries or ran.new_offset == 0), where
    if ran.call.continues is not None and exact[ran.call.continues]:
        assert usage.exact, where
    return usage.exact


def check_exact(ran: Ran, done: list[Ran], message: Encoded, oracle: Oracle, where: str) -> None:
    """A call that says that it is exact gives what a plain forward of the whole text gives."""
    text: list[int] = []
    pictures: list[Any] = []
    for number, start, stop in ran.spans:
        read = done[number]
        if read.call.pictures and stop - start < read.message.num_tokens:
            return  # no text that could be given to a model, if it ends inside of a picture
        text += read.message.token_ids[start:stop]
        pictures += read.call.pictures
    inputs = oracle.picture_inputs([*pictures, *ran.call.pictures])
    plain = oracle.plain_logits([*text, *message.token_ids], inputs)
    plain = plain.log_softmax(-1)[len(text) :]
    assert float((plain - message.logprobs()).abs().max()) < LOGPROB_TOLERANCE, where


def check_tokens(
    message: Message, encoded: Encoded, num_header: int, tolerance: float, tie_margin: float
) -> float:
    """Every generated token and every log-probability reported with it, against the oracle's.

    Returns:
        The largest difference in log-probability.
    """
    rows = encoded.logprobs()[num_header - 1 : -1]
    generated = message.token_ids[num_header:]
    assert message.logprobs is not None and len(message.logprobs) == len(generated) == len(rows)
    worst = 0.0
    for index, (token_id, row, reported) in enumerate(
        zip(generated, rows, message.logprobs, strict=True)
    ):
        where = f"token {index} of {message!r}"
        loss = float(row.max() - row[token_id])
        assert loss < tie_margin, f"{where}: {token_id}, the oracle's is {int(row.argmax())}"
        ids = torch.tensor(list(reported))
        values = torch.tensor([entry.logprob for entry in reported.values()])
        difference = float((row[ids] - values).abs().max())
        assert difference < tolerance, f"{where}: log-probabilities differ by {difference:.2e}"
        worst = max(worst, difference)
    return worst
