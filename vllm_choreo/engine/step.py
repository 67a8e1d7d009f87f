# SPDX-License-Identifier: Apache-2.0
"""What the scheduler sends to the workers with a step: integers in frozen dataclasses.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.semantics.positions import CallPlan, num_span_blocks


@dataclass(frozen=True)
class RequestSpans:
    """What the worker must know of one request; sent once per (re)start of the request.

    Attributes: one entry per parent, in slots, tokens and positions as `ops.spans.SpanBatch` has
    them.
        base: the first slot of the request's own span.
        shift: by so many positions from its virtual index the model sees an own token; those are
            not at 0 that are written into a message which is stored elsewhere.
        weights: with which it attends to all but the first of them, (temperature, factor); None:
            all count alike.
        other_groups: what groups of layers read that do not read these spans, by their number;
            with the same base, for vLLM stores the own tokens of all layers at the same slots.
    """

    first_slot: tuple[int, ...]
    num_tokens: tuple[int, ...]
    stored_position: tuple[int, ...]
    position_delta: tuple[int, ...]
    base: int
    shift: int = 0
    weights: tuple[float, float] | None = None
    other_groups: Mapping[int, RequestSpans] = field(default_factory=dict)

    @property
    def is_ordinary(self) -> bool:
        """The request reads its own tokens only, and these are where vLLM puts them."""
        return not (self.first_slot or self.base or self.shift or self.other_groups)

    def of_group(self, group: int) -> RequestSpans:
        """What the layers of a group read."""
        return self.other_groups.get(group, self)


@dataclass(frozen=True)
class BlockMove:
    """Rotate the keys of block `src` by `delta` positions into block `dst`, or in place."""

    src: int
    dst: int
    delta: int


@dataclass(frozen=True)
class KeptHidden:
    """What a request's tokens are given in some layers is kept by the workers.

    Attributes:
        key: under this name.
        layers: ascending.
        origin: the position at which the model sees the first own token.
    """

    key: int
    layers: tuple[int, ...]
    origin: int


@dataclass(frozen=True)
class Watch:
    """What the tokens of a run attend to is wanted.

    Attributes:
        call: for which; by its request id.
        layers: in which, ascending.
    """

    call: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class StageRun:
    """Tokens run through some layers of the model before a step, over keys of these layers.

    Attributes:
        layers: ranges `(first, stop)`, ascending.
        spans: what the tokens attend to.
        blocks: the block table: parents, then the message itself.
        first: virtual index of the first token.
        token_ids: of the message, from that one on.
        key: of the hidden states with which ranges begin; None: the only one begins with tokens.
        start: which of the message's tokens is the first.
        lora: vLLM's request of the adapter with which they are run; None: without.
        watch: None: the tokens are run for the keys and values alone.
    """

    layers: tuple[tuple[int, int], ...]
    spans: RequestSpans
    blocks: tuple[int, ...]
    first: int
    token_ids: tuple[int, ...]
    key: int | None
    start: int
    lora: Any = None
    watch: Watch | None = None


@dataclass(frozen=True)
class ChoreoStep:
    """What the scheduler sends to the workers with a step.

    Attributes:
        started: spans of the requests that start, or start again, in this step.
        moves: keys to rotate before it; those in place come first.
        saves, loads: blocks to copy before that to and from host memory, as `(source, target)`.
        stages: to run after all of that, before the step, in this order.
        kept: of the requests that start, or start again: hidden states to keep.
        forgotten: keys of hidden states that are needed no longer when the stages have run.
        reloads: vLLM's requests of adapters whose weights have been replaced, to load before all.
    """

    started: dict[str, RequestSpans]
    moves: tuple[BlockMove, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    stages: tuple[StageRun, ...] = ()
    kept: Mapping[str, KeptHidden] = field(default_factory=dict)
    forgotten: tuple[int, ...] = ()
    reloads: tuple[Any, ...] = ()


# What a worker tells the scheduler with the output of a step, by its name there.
_ATTENTION = "choreo_attention"


def tell_attention(output: Any, attention: Mapping[str, Sequence[Sequence[float]]]) -> Any:
    """A copy of what a step of vLLM's puts out that tells what calls attended to, besides.

    Args:
        attention: by the ids of calls, of each parent, that each token got.
    """
    told = copy(output)
    setattr(told, _ATTENTION, attention)
    return told


def attention_of(output: Any) -> Mapping[str, Sequence[Sequence[float]]]:
    """See `tell_attention`."""
    return getattr(output, _ATTENTION, {})


def request_spans(
    plan: CallPlan,
    stored_positions: Sequence[int],
    block_size: int,
    own_start: int = 0,
    own_position: int | None = None,
) -> RequestSpans:
    """Spans of a call, given the position at which each parent's first token is stored now.

    With the first key of span j stored at `s_j` and seen at `a_j`, and the new message at `o`
    while the model rotates it as if it stood at `own_position`, the query turns by
    `(o - own_position) + (s_j - a_j)` positions.

    Args:
        own_start: the first own token that is seen.
        own_position: to which token 0 of the message is rotated; None: as the plan says.
    """
    own_position = plan.own_position if own_position is None else own_position
    first_slots, stored, deltas, slot = [], [], [], 0
    for parent, message_position in zip(plan.parents, stored_positions, strict=True):
        position = message_position + parent.start
        first_slots.append(slot + parent.start % block_size)
        stored.append(position)
        deltas.append(plan.new_offset - own_position + position - parent.offset)
        slot += num_span_blocks(parent.start, parent.stop, block_size) * block_size
    return RequestSpans(
        first_slot=tuple(first_slots),
        num_tokens=tuple(parent.num_tokens for parent in plan.parents),
        stored_position=tuple(stored),
        position_delta=tuple(deltas),
        base=plan.base + own_start,
        shift=own_position - plan.base,
        weights=plan.weights and (plan.weights.temperature, plan.weights.factor),
    )
