# SPDX-License-Identifier: Apache-2.0
"""From what a call asks for to where everything lies: integers in, frozen dataclasses out.

Imports neither torch nor vllm. To vLLM a call is an ordinary request over a *virtual sequence*:
each parent's tokens, padded to whole KV blocks, then the new tokens::

    virtual index   0        bs       2bs      3bs = base
                    | p1 p1 .. pad    | p2 pad | new tokens ...
    seen position     a_1, a_1+1 ..     a_2 ..   o, o+1 ...

New tokens are rotated by their virtual index. Scores depend on relative positions only, so the
query is rotated by a further `position_delta` before it meets the keys of a parent. Where they
depend on the position itself, as in models that scale queries by it, the model is told the seen
position of a new token instead: such a call is *placed*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_choreo.errors import OffsetError, TooLongError
from vllm_choreo.repair.weights import Weights
from vllm_choreo.semantics.params import check_span


@dataclass(frozen=True)
class ParentPlan:
    """Tokens `start … stop-1` of a message, seen from position `offset` on."""

    message_id: str
    start: int
    stop: int
    offset: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class CallPlan:
    """A call whose parents have known lengths: every position is decided.

    Attributes:
        parents: the parents, in the order of the call.
        new_offset: position of the first new token.
        base: virtual index of the first new token, a multiple of the block size.
        exact: True if the result is that of an ordinary request on the concatenated text.
        repaired_tokens: tokens of the parents that are read as encoded in the call's context.
        is_placed: True if the model sees new tokens at their positions, not at their virtual
            indices.
        weights: weights of the parents; None: all count alike.
    """

    parents: tuple[ParentPlan, ...]
    new_offset: int
    base: int
    exact: bool
    repaired_tokens: int = 0
    is_placed: bool = False
    weights: Weights | None = None

    @property
    def own_position(self) -> int:
        """Position to which the model rotates the first new token."""
        return self.new_offset if self.is_placed else self.base


def resolve_offsets(
    lengths: Sequence[int], offsets: Sequence[int | None] | None, new_offset: int | None
) -> tuple[tuple[int, ...], int]:
    """Fill in omitted offsets: each parent after the one before it, the new message at the end."""
    placed: list[int] = []
    end = 0
    given = offsets if offsets is not None else [None] * len(lengths)
    for length, offset in zip(lengths, given, strict=True):
        placed.append(end if offset is None else offset)
        end = placed[-1] + length
    return tuple(placed), end if new_offset is None else new_offset


def is_text(
    lengths: Sequence[int], offsets: Sequence[int], new_offset: int, from_zero: bool = False
) -> bool:
    """Return whether all lies one right after the other, from anywhere or from position 0."""
    if from_zero and (*offsets, new_offset)[0]:
        return False
    ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
    return ends == [*offsets[1:], new_offset][: len(ends)]


def check_text_offsets(
    lengths: Sequence[int],
    offsets: Sequence[int | None] | None,
    new_offset: int | None,
    from_zero: bool = False,
) -> None:
    """Refuse positions that no text has; a constant added to all of them is allowed.

    Args:
        from_zero: the first position must be 0, for the model scales queries by their position.

    Raises:
        OffsetError: there is a gap, an overlap, or another order.
    """
    placed, end = resolve_offsets(lengths, offsets, new_offset)
    parameter = "new_offset" if offsets is None else "offsets"
    value = new_offset if offsets is None else offsets
    if from_zero and (*placed, end)[0]:
        raise OffsetError(
            "this model scales queries by their position, and a text begins at position 0; leave "
            "offsets and new_offset out, or call with mode='choreo'",
            parameter=parameter,
            value=value,
        )
    if not is_text(lengths, placed, end):
        raise OffsetError(
            "in exact mode the parents and the new tokens follow one another as text does; leave "
            "offsets and new_offset out, or call with mode='choreo'",
            parameter=parameter,
            value=value,
        )


def resolve_span(
    start: int | None, stop: int | None, num_tokens: int, message_id: str
) -> tuple[int, int]:
    """The sub-span `start … stop-1` of a message of `num_tokens` tokens.

    Raises:
        SpanError: the span is empty or does not lie inside the message.
    """
    value = (message_id, start, stop)
    check_span(start, stop, num_tokens, value, f"message {message_id!r}")
    return start or 0, num_tokens if stop is None else stop


def first_seen(span: ParentPlan, new_offset: int, window: int | None) -> int:
    """Index of the first token of a span that a call sees in layers of one kind.

    The call's first token, at `new_offset`, sees furthest back, and all see what lies to the right.

    Args:
        window: the layers' sliding window; None: they have none.

    Returns:
        The index in the message; `span.stop`: it sees none.
    """
    if window is None:
        return span.start
    first = span.start + new_offset - window + 1 - span.offset
    return min(max(span.start, first), span.stop)


def num_span_blocks(start: int, stop: int, block_size: int) -> int:
    """Blocks that hold slots `start … stop-1` of a message whose first slot begins a block."""
    return -(-stop // block_size) - start // block_size


def check_length(
    plan: CallPlan, num_new_tokens: int, max_model_len: int, *, generates: bool = False
) -> None:
    """Refuse what does not fit into the model's context, before anything is allocated.

    Args:
        generates: True if tokens follow the new ones, one at least.

    Raises:
        TooLongError: the virtual sequence, or the room for sampled tokens, is too long.
        OffsetError: a position lies beyond the last one that the model knows.
    """
    # vLLM samples a token after every prompt, also where it is dropped: after the message as a
    # whole, too, when its last token is encoded.
    room = 1 + generates
    virtual = plan.base + num_new_tokens + room
    if virtual > max_model_len:
        raise TooLongError(
            f"the parents (padded to whole blocks: {plan.base}) and {num_new_tokens} new tokens "
            f"take {virtual} of max_model_len={max_model_len} slots; name fewer parents or "
            "sub-spans, or start the engine with a larger max_model_len",
            parameter="parents",
            value=[parent.message_id for parent in plan.parents],
        )
    for parent in plan.parents:
        if parent.offset + parent.num_tokens > max_model_len:
            raise OffsetError(
                f"a parent of {parent.num_tokens} tokens seen from position {parent.offset} ends "
                f"beyond max_model_len={max_model_len}; choose a smaller offset",
                parameter="offsets",
                value=[p.offset for p in plan.parents],
            )
    if plan.new_offset + num_new_tokens + room > max_model_len:
        raise OffsetError(
            f"{num_new_tokens} new tokens from position {plan.new_offset} end beyond "
            f"max_model_len={max_model_len}; choose a smaller new_offset",
            parameter="new_offset",
            value=plan.new_offset,
        )


def virtual_tokens(spans: Sequence[tuple[Sequence[int], int, int]], block_size: int) -> list[int]:
    """Token ids of the padded parents: `(token ids of the message, start, stop)` each.

    Padding repeats tokens of the span itself: vLLM's penalties look at the *set* of prompt
    tokens, which then is that of the concatenated text.
    """
    tokens: list[int] = []
    for token_ids, start, stop in spans:
        visible = token_ids[start:stop]
        tokens += [visible[0]] * (start % block_size)
        tokens += visible
        tokens += [visible[-1]] * (-stop % block_size)
    return tokens
