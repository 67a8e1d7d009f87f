# SPDX-License-Identifier: Apache-2.0
"""Parts of a step that the scheduler sends to the workers: integers in frozen dataclasses.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeVar

from vllm_choreo.memory_changes import BlockMove, StateStart
from vllm_choreo.semantics.other_model import AdapterRequest
from vllm_choreo.semantics.positions import CallPlan, first_seen, num_span_blocks

_Output = TypeVar("_Output")


@dataclass(frozen=True)
class RequestSpans:
    """Spans of one request; sent once per (re)start of the request.

    Attributes:
        first_slot, num_tokens, stored_position, position_delta: one entry per parent, in slots,
            tokens and positions, as in `ops.spans.SpanBatch`.
        base: the first slot of the request's own span.
        shift: positions from the virtual index of an own token to where the model sees it.
        parent: number of the parent of each entry, for layers with windows leave some out; empty:
            none is left out.
        weights: (temperature, factor) by which it attends to all parents but the first; None:
            all count alike.
        other_groups: spans of the groups of layers that read others, by number of the group;
            with the same base, for vLLM stores the own tokens of all layers at the same slots.
    """

    first_slot: tuple[int, ...]
    num_tokens: tuple[int, ...]
    stored_position: tuple[int, ...]
    position_delta: tuple[int, ...]
    base: int
    shift: int = 0
    parent: tuple[int, ...] = ()
    weights: tuple[float, float] | None = None
    other_groups: Mapping[int, RequestSpans] = field(default_factory=dict)

    @property
    def is_ordinary(self) -> bool:
        """True if the request reads its own tokens only, and these are where vLLM puts them."""
        return not (self.first_slot or self.base or self.shift or self.other_groups)

    def of_group(self, group: int) -> RequestSpans:
        """Spans that the layers of a group read."""
        return self.other_groups.get(group, self)


@dataclass(frozen=True)
class HiddenCapture:
    """Capture of hidden states: workers store what some layers are given for a request's tokens.

    Attributes:
        key: name under which they are stored.
        layers: numbers of these layers, ascending.
        origin: the position at which the model sees the first own token.
    """

    key: int
    layers: tuple[int, ...]
    origin: int


@dataclass(frozen=True)
class Watch:
    """Request for the attention that the tokens of a run give to each token of the parents.

    Attributes:
        call: request id of the call that looks.
        layers: numbers of the layers that count, ascending.
        num_tokens: tokens of each parent.
    """

    call: str
    layers: tuple[int, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True)
class StageRun:
    """Tokens run through some layers of the model before a step, over keys of these layers.

    Attributes:
        layers: ranges `(first, stop)`, ascending.
        spans: spans that the tokens attend to.
        blocks: the block table of each KV cache group: parents, then the message itself.
        first: virtual index of the first token.
        token_ids: tokens of the message, from the first one on.
        key: name of the hidden states with which ranges begin; None: the only range begins with
            the tokens.
        start: index in the message of the first token.
        lora: vLLM's request of the adapter with which they are run; None: without.
        watch: attention to sum up; None: the tokens are run for the keys and values alone.
    """

    layers: tuple[tuple[int, int], ...]
    spans: RequestSpans
    blocks: tuple[tuple[int, ...], ...]
    first: int
    token_ids: tuple[int, ...]
    key: int | None
    start: int
    lora: AdapterRequest | None = None
    watch: Watch | None = None


@dataclass(frozen=True)
class ChoreoStep:
    """Part of a step that the scheduler sends to the workers.

    Attributes:
        started: spans of the requests that start, or start again, in this step.
        moves: keys to rotate before it; those in place come first.
        saves, loads: blocks to copy before that to and from host memory, as `(source, target)`.
        stages: runs of layers after all of that, before the step, in this order.
        captures: hidden states to store of the requests that start, or start again.
        forgotten: keys of hidden states that are needed no longer when the stages have run.
        reloads: vLLM's requests of adapters whose weights have been replaced, to load before all.
        states: number of the state of each request that starts, starts again, or goes on with a
            copy of its own, in models that have states; empty in others.
        state_saves, state_loads: states to copy before that to and from host memory, likewise.
        state_starts: states that begin then, before the step runs.
    """

    started: dict[str, RequestSpans]
    moves: tuple[BlockMove, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    stages: tuple[StageRun, ...] = ()
    captures: Mapping[str, HiddenCapture] = field(default_factory=dict)
    forgotten: tuple[int, ...] = ()
    reloads: tuple[AdapterRequest, ...] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    state_saves: tuple[tuple[int, int], ...] = ()
    state_loads: tuple[tuple[int, int], ...] = ()
    state_starts: tuple[StateStart, ...] = ()

    def written_blocks(self) -> set[int]:
        """Blocks that are written before the step itself, and those that stage runs read."""
        moved = (move.dst for move in self.moves)
        loaded = (target for _, target in self.loads)
        staged = (block for stage in self.stages for held in stage.blocks for block in held)
        return {*moved, *loaded, *staged}


# Attribute of vLLM's `SchedulerOutput`, by which the scheduler sends it to the workers.
_STEP = "choreo"


def add_step(output: object, step: ChoreoStep) -> None:
    """Add our part of a step to vLLM's."""
    setattr(output, _STEP, step)


def step_of(output: object) -> ChoreoStep | None:
    """Part that `add_step` added to a step; None: it comes from no scheduler."""
    return getattr(output, _STEP, None)


# Attribute of the output of a step, by which a worker sends it to the scheduler.
_ATTENTION = "choreo_attention"


def with_attention(output: _Output, attention: Mapping[str, Sequence[Sequence[float]]]) -> _Output:
    """Copy the output of a step of vLLM's, with the attention that parents' tokens got added.

    Args:
        attention: lists of the attention that each token of a parent got, by call id.
    """
    copied = copy(output)
    setattr(copied, _ATTENTION, attention)
    return copied


def attention_of(output: object) -> Mapping[str, Sequence[Sequence[float]]]:
    """Attention that `with_attention` added to an output; empty if there is none."""
    return getattr(output, _ATTENTION, {})


def request_spans(
    plan: CallPlan,
    stored_positions: Sequence[int],
    block_size: int,
    own_start: int = 0,
    own_position: int | None = None,
    windows: Sequence[int | None] = (None,),
    first_read: int = 0,
) -> RequestSpans:
    """Spans of a call, given the position at which each parent's first token is stored now.

    With the first key of span j stored at `s_j` and seen at `a_j`, and the new message at `o`
    while the model rotates it as if it stood at `own_position`, the query turns by
    `(o - own_position) + (s_j - a_j)` positions.

    Args:
        own_start: the first own token that is seen.
        own_position: position to which token 0 of the message is rotated; None: as the plan says.
        windows: sliding window of each KV cache group: its layers read what it lets the call see.
        first_read: the first own token that is run, and so sees furthest back.
    """
    own_position = plan.own_position if own_position is None else own_position
    empty = RequestSpans(
        *((),) * 4,
        base=plan.base + own_start,
        shift=own_position - plan.base,
        weights=plan.weights and (plan.weights.temperature, plan.weights.factor),
    )
    reader = plan.new_offset + first_read
    seen = {
        w: _seen_spans(empty, plan, stored_positions, block_size, reader, w) for w in {*windows}
    }
    first = seen[windows[0]]
    others = {group: seen[w] for group, w in enumerate(windows) if seen[w] != first}
    return replace(first, other_groups=others) if others else first


def _seen_spans(
    empty: RequestSpans,
    plan: CallPlan,
    stored_positions: Sequence[int],
    block_size: int,
    reader: int,
    window: int | None,
) -> RequestSpans:
    """Spans of a call in layers with a window, or without one: `empty` has all but the parents.

    Args:
        reader: position of the token that sees furthest back.
    """
    first_slots, lengths, stored, deltas, numbers, slot = [], [], [], [], [], 0
    own_position = empty.shift + plan.base
    positions = zip(plan.parents, stored_positions, strict=True)
    for number, (parent, message_position) in enumerate(positions):
        first = first_seen(parent, reader, window)
        if first < parent.stop:
            numbers.append(number)
            first_slots.append(slot + parent.start % block_size + first - parent.start)
            lengths.append(parent.stop - first)
            stored.append(message_position + first)
            deltas.append(
                plan.new_offset - own_position + message_position + parent.start - parent.offset
            )
        slot += num_span_blocks(parent.start, parent.stop, block_size) * block_size
    return replace(
        empty,
        first_slot=tuple(first_slots),
        num_tokens=tuple(lengths),
        stored_position=tuple(stored),
        position_delta=tuple(deltas),
        parent=tuple(numbers),
    )
