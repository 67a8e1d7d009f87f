# SPDX-License-Identifier: Apache-2.0
"""A choreographed call inside the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm.v1.request import Request

from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.encoding import Encoding, StoredMessage


@dataclass
class Watching:
    """First look of a call whose repair goes by attention at its parents, as they are stored.

    Attributes:
        plan: positions of the call without repair.
        is_staged: True once a step was planned in which it looks.
        attention: one list per parent, the attention that each token in its span gets; None: not
            known yet.
    """

    plan: CallPlan
    is_staged: bool = False
    attention: Sequence[Sequence[float]] | None = None


@dataclass(eq=False)
class ScheduledCall:
    """A request that makes a message, or encodes one again.

    Attributes:
        request: vLLM's request; its prompt is the new tokens until `resolve`, then the virtual
            sequence.
        encoding: the encoding that it makes or encodes again.
        parents: encodings that it attends to; once planned, copies among them in exact mode.
        params: the caller's parameters; None for an encoding again.
        serves: the call for which this one encodes something again, or None.
        helpers: the calls that encode something again for this one.
        beneficiary: the caller's call for whose sake it runs: itself, unless it encodes again.
        run: the tokens of a patch that this one writes; None: all that the encoding lacks.
        plan: positions; None until all parents are known and, if it watches, their attention.
        watching: first look at the parents, for repair by attention; None: there is none.
        is_scheduled: True while it has slots and reads its parents.
        num_shared: tokens of its message that another of the same digest had encoded.
        num_served: number of encodings that were encoded again or brought back for its sake while
            no call of a caller's began or ended.
        max_served: limit of `num_served`; 0: not known yet.
        served_since: number of calls begun and ended when `num_served` was last reset.
        stored_positions: positions of each parent's first key, while it is scheduled.
        own_turn: priority, 0 unless vLLM schedules by that, and order of arrival; the priority is
            the first of its own and of those of the calls that wait for it.
        closes_gaps: whether it encodes again what is resident, for the blocks that were given up in
            groups with windows.
        closed_gaps: group and index of each block that the encoding got so.
        parked_on: the parent that it waits for, which is not known yet; None: all are known.
    """

    request: Request
    encoding: Encoding
    parents: tuple[Encoding, ...]
    params: ChoreoParams | None
    serves: ScheduledCall | None = None
    run: TokenRange | None = None
    plan: CallPlan | None = None
    watching: Watching | None = None
    is_scheduled: bool = False
    num_shared: int = 0
    num_served: int = 0
    max_served: int = 0
    served_since: int = 0
    stored_positions: Sequence[int] | None = None
    own_turn: tuple[int, int] = (0, 0)
    closes_gaps: bool = False
    closed_gaps: list[tuple[int, int]] = field(default_factory=list)
    parked_on: Encoding | None = None
    helpers: set[ScheduledCall] = field(default_factory=set, repr=False)
    beneficiary: ScheduledCall = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.beneficiary = self
        if self.serves is not None:
            self.serve(self.serves)

    def serve(self, other: ScheduledCall) -> None:
        """Encode for another call, in its turn, with all calls that encode for this one."""
        if self.serves is not None:
            self.serves.helpers.discard(self)
        self.serves = other
        other.helpers.add(self)
        for call in self.with_helpers():
            call.beneficiary = other.beneficiary

    def with_helpers(self) -> Iterator[ScheduledCall]:
        """This call and all that encode for it, even indirectly."""
        found = [self]
        while found:
            call = found.pop()
            yield call
            found += call.helpers

    def with_served(self) -> Iterator[ScheduledCall]:
        """This call, the one for which it encodes something, and so on to a caller's."""
        call: ScheduledCall | None = self
        while call is not None:
            yield call
            call = call.serves

    @property
    def turn(self) -> tuple[int, int]:
        """Its own turn; an encoding again has that of the call for whose sake it runs."""
        return self.beneficiary.own_turn

    @property
    def id(self) -> str:
        """Id of its request."""
        return self.request.request_id

    @property
    def message(self) -> StoredMessage:
        return self.encoding.message

    @property
    def is_internal(self) -> bool:
        return self.params is None

    @property
    def is_decode(self) -> bool:
        return self.params is not None and self.params.kind == "decode"

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the caller asked for the log-probabilities of the new tokens."""
        params = self.request.sampling_params
        return params is not None and params.prompt_logprobs is not None

    @property
    def num_header_tokens(self) -> int:
        """Number of new tokens in its prompt, which is the virtual sequence."""
        assert self.plan is not None
        return self.request.num_prompt_tokens - self.plan.base

    @property
    def reads(self) -> tuple[Encoding, ...]:
        """Encodings that must stay in place while the call runs; a run reads its patch, too."""
        return self.parents if self.run is None else (*self.parents, self.encoding)

    @property
    def own_position(self) -> int:
        """Position to which the model rotates the own token 0."""
        assert self.plan is not None
        return self.plan.own_position if self.run is None else self.encoding.stored_position

    def needed(self) -> Iterator[set[Encoding]]:
        """Encodings that this call needs now, then those that the calls it serves need later."""
        for call in self.with_served():
            sources = (p.patch.source for p in call.parents if p.patch and not p.blocks)
            yield {call.encoding, *call.parents, *sources}
