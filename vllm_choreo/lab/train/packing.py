# SPDX-License-Identifier: Apache-2.0
"""A choreography as one packed sequence: which keys a call reads, and how far to turn them.

    packed rows     | call 0      | call 1   | call 2     |   every token once
    positions         0 1 2 3 4     0 1 2      9 10 11 12     those of the encoding
    keys of call 2  | 1 2 of call 0, turned | call 1, turned | its own |

A key is rotated once, to the position at which its message was encoded. A call that sees it
elsewhere reads a copy, turned by the difference. Rotation is linear, so gradients flow back into
the message through every copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_choreo.errors import ChoreoError, EmptyTokensError, OffsetError, SpanError
from vllm_choreo.semantics.params import check_span


@dataclass(frozen=True)
class SeenSpan:
    """Tokens `start … stop - 1` of call number `call`, the first of them seen at `offset`."""

    call: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class PackedCall:
    """One call with every number resolved.

    Attributes:
        token_ids: the header or tokens, then the generated ones.
        parents: spans of earlier calls; any order, gaps, overlaps, repetitions.
        new_offset: position of the first token.
        num_generated: how many tokens at the end were generated, hence are trained on; 0 for a
            prefill.

    Raises:
        EmptyTokensError: no tokens, or nothing but generated ones.
        OffsetError: a negative position.
    """

    token_ids: tuple[int, ...]
    parents: tuple[SeenSpan, ...] = ()
    new_offset: int = 0
    num_generated: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_generated < len(self.token_ids):
            raise EmptyTokensError(
                f"a call of {len(self.token_ids)} tokens cannot have generated "
                f"{self.num_generated} of them: a header of at least one token comes first",
                parameter="num_generated",
                value=self.num_generated,
            )
        offsets = [self.new_offset, *(span.offset for span in self.parents)]
        if min(offsets) < 0:
            raise OffsetError("positions are 0 or more", parameter="offset", value=min(offsets))

    @property
    def is_decode(self) -> bool:
        return self.num_generated > 0

    @property
    def end(self) -> int:
        """One more than the largest position that the call uses."""
        ends = [span.offset + span.stop - span.start for span in self.parents]
        return max([self.new_offset + len(self.token_ids), *ends])


@dataclass(frozen=True, eq=False)
class Packing:
    """Calls in one sequence. Tensors are int64 on one device; `to` moves them.

    Attributes:
        calls: all calls, in an order in which parents come first.
        token_ids, positions: `[num_tokens]`, of the packed sequence.
        starts: first row of each call, then `num_tokens`.
        key_rows: `[num_keys]`, packed rows of the keys that call 0 reads (parents as listed, then
            its own), then call 1, and so on.
        deltas: `[num_keys]`, positions by which each of them is turned further; 0 for own ones.
        key_starts: first entry of each call in `key_rows`, then `num_keys`.
    """

    calls: tuple[PackedCall, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    starts: tuple[int, ...]
    key_rows: torch.Tensor
    deltas: torch.Tensor
    key_starts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def rows(self, call: int) -> slice:
        """The packed rows of a call."""
        return slice(self.starts[call], self.starts[call + 1])

    def keys(self, call: int) -> slice:
        """The entries of `key_rows` that a call reads."""
        return slice(self.key_starts[call], self.key_starts[call + 1])

    @cached_property
    def masks(self) -> tuple[torch.Tensor | None, ...]:
        """Mask of each call: bool `[num_queries, num_keys]`, True where attended; None: all causal.

        A query attends to every parent's token, and to the call's own up to itself: causal,
        aligned at the bottom right.
        """
        return tuple(self._mask(i) if call.parents else None for i, call in enumerate(self.calls))

    def _mask(self, call: int) -> torch.Tensor:
        rows, keys = self.rows(call), self.keys(call)
        num_queries, num_keys = rows.stop - rows.start, keys.stop - keys.start
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.token_ids.device)
        return ones.tril(num_keys - num_queries)

    @cached_property
    def trained_rows(self) -> torch.Tensor:
        """`[num_trained]`: the rows whose logits predict a generated token, call after call."""
        ranges = [
            torch.arange(stop - call.num_generated - 1, stop - 1)
            for call, stop in zip(self.calls, self.starts[1:], strict=True)
            if call.is_decode
        ]
        rows = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)
        return rows.to(self.token_ids.device)

    @property
    def trained_ids(self) -> torch.Tensor:
        """`[num_trained]`: the generated tokens that `trained_rows` predict."""
        return self.token_ids[self.trained_rows + 1]

    def to(self, device: torch.device | str) -> Packing:
        """The same packing on a device."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            key_rows=self.key_rows.to(device),
            deltas=self.deltas.to(device),
        )

    def per_token(self, flags: Sequence[bool]) -> torch.Tensor:
        """Spread a flag per call over its tokens: bool `[num_tokens]`.

        Raises:
            ChoreoError: not one flag per call.
        """
        if len(flags) != len(self.calls):
            raise ChoreoError(
                f"give one flag for each of the {len(self.calls)} calls",
                parameter="adapted",
                value=len(flags),
            )
        device = self.token_ids.device
        lengths = torch.tensor([len(call.token_ids) for call in self.calls], device=device)
        return torch.tensor(list(flags), device=device).repeat_interleave(lengths)


def pack(calls: Sequence[PackedCall]) -> Packing:
    """Lay calls out in one sequence, in the order given.

    Raises:
        SpanError: a parent is no earlier call, or a span does not lie inside its call.
    """
    if not calls:
        raise EmptyTokensError("there is no call to pack", parameter="calls", value=calls)
    starts, key_starts = [0], [0]
    rows: list[torch.Tensor] = []
    deltas: list[torch.Tensor] = []
    for number, call in enumerate(calls):
        for span in call.parents:
            _check_span(span, number, calls)
            first = starts[span.call] + span.start
            rows.append(torch.arange(first, first + span.stop - span.start))
            encoded_at = calls[span.call].new_offset + span.start
            deltas.append(torch.full_like(rows[-1], span.offset - encoded_at))
        starts.append(starts[-1] + len(call.token_ids))
        rows.append(torch.arange(starts[-2], starts[-1]))
        deltas.append(torch.zeros_like(rows[-1]))
        num_read = sum(span.stop - span.start for span in call.parents)
        key_starts.append(key_starts[-1] + num_read + len(call.token_ids))
    return Packing(
        calls=tuple(calls),
        token_ids=torch.tensor([token for call in calls for token in call.token_ids]),
        positions=torch.cat(
            [torch.arange(call.new_offset, call.new_offset + len(call.token_ids)) for call in calls]
        ),
        starts=tuple(starts),
        key_rows=torch.cat(rows),
        deltas=torch.cat(deltas),
        key_starts=tuple(key_starts),
    )


def pack_as_text(packing: Packing) -> Packing:
    """Pack each call that generated as the text that it stands for: no parents, no rotation.

    A text is the tokens of the parents as listed, then the call's own, from position 0. The trained
    rows come in the same order, for the same tokens, as in `packing`.
    """
    texts = []
    for call in packing.calls:
        if call.is_decode:
            read = [
                token
                for span in call.parents
                for token in packing.calls[span.call].token_ids[span.start : span.stop]
            ]
            tokens = (*read, *call.token_ids)
            texts.append(PackedCall(tokens, num_generated=call.num_generated))
    return pack(texts).to(packing.token_ids.device)


def _check_span(span: SeenSpan, number: int, calls: Sequence[PackedCall]) -> None:
    if not 0 <= span.call < number:
        raise SpanError(
            f"call {number} can read the calls before it alone", parameter="parents", value=span
        )
    num_tokens = len(calls[span.call].token_ids)
    check_span(span.start, span.stop, num_tokens, span, f"call {span.call}")
