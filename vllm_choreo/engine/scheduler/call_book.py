# SPDX-License-Identifier: Apache-2.0
"""Choreographed calls inside the scheduler: from named parents to adopted blocks.

The way of a call: `open` (parents named) -> `resolve` (their lengths known: positions decided,
virtual sequence written into vLLM's request) -> `is_ready` (their keys and values exist, at the
latest in the step being planned) -> `scheduled` (blocks adopted) -> `close`.

A call is also how a message is *encoded again*: after eviction, or to give the last sampled
token its key and value, for which vLLM has no need when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from vllm_choreo.engine.step import RequestSpans, request_spans
from vllm_choreo.errors import (
    CyclicParentsError,
    EmptyTokensError,
    ParentFailedError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.positions import (
    CallPlan,
    ParentPlan,
    check_length,
    check_text_offsets,
    num_span_blocks,
    resolve_offsets,
    resolve_span,
    virtual_tokens,
)
from vllm_choreo.semantics.provenance import trace_of
from vllm_choreo.store.exact import Link, exact_chain, is_exact
from vllm_choreo.store.store import Message, MessageStore

# Contention may make a call lose what was encoded again for it, but not this often.
_ROUNDS = 8


@dataclass(eq=False)
class Call:
    """A request that makes a message, or encodes one again.

    Attributes:
        request: vLLM's request; its prompt is the new tokens until `resolve`, then the virtual
            sequence.
        message: what it makes or encodes again.
        parents: what it attends to; in exact mode, once it has its plan, copies among them.
        params: as the caller gave them; None for an encoding again.
        serves: the call for which this one encodes a message again, or None.
        plan: positions; None until all parents are known.
        admitted: it runs (or is being scheduled) and reads its parents.
        num_shared: tokens of its message that another of the same recipe had encoded.
        num_served: how often a message was encoded again for its sake.
        stored_positions: while admitted, where the first key of each parent's message is stored.
    """

    request: Request
    message: Message
    parents: tuple[Message, ...]
    params: ChoreoParams | None
    serves: Call | None = None
    plan: CallPlan | None = None
    admitted: bool = False
    num_shared: int = 0
    num_served: int = 0
    stored_positions: Sequence[int] | None = None

    @property
    def is_internal(self) -> bool:
        return self.params is None

    @property
    def is_decode(self) -> bool:
        return self.params is not None and self.params.kind == "decode"

    def needed(self) -> list[set[Message]]:
        """Messages that this call needs now, then those that the calls it serves need later."""
        own = {self.message, *self.parents}
        return [own, *self.serves.needed()] if self.serves else [own]

    @property
    def beneficiary(self) -> Call:
        """The caller's call for whose sake this one runs: itself, unless it encodes again."""
        return self.serves.beneficiary if self.serves else self


class CallBook:
    """The calls in flight. Knows messages and plans; queues and allocation are the scheduler's."""

    def __init__(self, store: MessageStore, max_model_len: int) -> None:
        self.store = store
        self.block_size = store.block_size
        self.max_model_len = max_model_len
        self.calls: dict[str, Call] = {}  # by request id, in order of arrival

    def open(self, request: Request, params: ChoreoParams) -> Call:
        """Enter a new call.

        Raises:
            ChoreoError: it can never run.
        """
        _check_options(request)
        name = params.save_as or request.request_id
        if any(parent.id == name for parent in params.parents):
            raise CyclicParentsError(
                "a call cannot wait for the message that it makes itself; leave it out",
                parameter="parents",
                value=name,
            )
        parents = tuple(self.store.get(params.session, p.id) for p in params.parents)
        origin = self.store.get(params.session, params.copy_of) if params.copy_of else None
        traces = [parent.trace for parent in parents]
        trace = trace_of(name, traces, params.exact, origin.trace if origin else None)
        trace.check(params.deny)
        adapter = request.lora_request
        message = self.store.create(params.session, name, adapter, params.tenant)
        message.parents, message.trace, message.encoder = parents, trace, request.request_id
        if params.kind == "prefill":
            message.token_ids = list(request.prompt_token_ids or ())
            request.max_tokens = 1  # vLLM samples one; it is no part of the message
        return self._enter(Call(request, message, parents, params))

    def open_encode(self, request: Request, message: Message, serves: Call | None) -> Call:
        """Enter a call that encodes what is missing of a known message."""
        message.encoder = request.request_id
        return self._enter(Call(request, message, message.parents, None, serves))

    def _enter(self, call: Call) -> Call:
        # Choreographed keys and values stay out of vLLM's prefix cache: nothing is hashed.
        call.request.block_hashes.clear()
        call.request._block_hasher = None
        call.request.skip_reading_prefix_cache = True
        for parent in call.parents:
            parent.num_waiting += 1
        self.calls[call.request.request_id] = call
        return call

    def resolve(self, call: Call) -> bool:
        """Decide positions and write the virtual sequence, once all parents are known.

        Returns:
            Whether the call has its plan now.

        Raises:
            ChoreoError: it does not fit, or a parent failed.
        """
        if call.plan is not None:
            return True
        for parent in call.parents:
            if parent.failure:
                raise ParentFailedError(
                    f"the parent was never completed: {parent.failure}",
                    parameter="parents",
                    value=parent.id,
                )
        # A prefill's tokens are known before its own parents are, and with them its plan.
        if not all(parent.is_known and parent.plan for parent in call.parents):
            return False
        if call.message.plan is None:
            call.message.plan = self._plan(call)
            if call.message.is_known:
                self.store.identify(call.message)
        call.plan = call.message.plan
        self._write_virtual_sequence(call)
        return True

    def _plan(self, call: Call) -> CallPlan:
        params, adapter = call.params, call.message.adapter
        assert params is not None, "a message that is encoded again has its plan"
        links = [
            Link(parent, *resolve_span(named.start, named.stop, parent.num_tokens, parent.id))
            for named, parent in zip(params.parents, call.parents, strict=True)
        ]
        lengths = [link.num_tokens for link in links]
        offsets, new_offset = resolve_offsets(lengths, params.offsets, params.new_offset)
        if params.exact:
            check_text_offsets(lengths, offsets, new_offset)
        # What an exact call reads begins with the first token of a message: of a copy, if need be.
        starts = [0 if params.exact else link.start for link in links]
        parents = tuple(
            ParentPlan(link.message.id, start, start + link.num_tokens, offset)
            for link, start, offset in zip(links, starts, offsets, strict=True)
        )
        base = self.block_size * sum(
            num_span_blocks(parent.start, parent.stop, self.block_size) for parent in parents
        )
        exact = params.exact or is_exact(links, offsets, new_offset, adapter)
        plan = CallPlan(parents, new_offset, base, exact)
        check_length(plan, call.request.num_prompt_tokens, self.max_model_len)
        if params.exact:
            chain = exact_chain(links, adapter, self.store)
            self._read_instead(call, tuple(link.message for link in chain))
        return plan

    def _read_instead(self, call: Call, parents: tuple[Message, ...]) -> None:
        """Wait for other parents than those that were listed."""
        listed, call.parents, call.message.parents = call.parents, parents, parents
        for parent in parents:
            parent.num_waiting += 1
        for parent in listed:
            parent.num_waiting -= 1
            self.store.settle(parent)

    def _write_virtual_sequence(self, call: Call) -> None:
        plan, request = call.plan, call.request
        assert plan is not None and request.prompt_token_ids is not None
        num_new_tokens = request.num_prompt_tokens
        padded = virtual_tokens(
            [
                (parent.token_ids or (), span.start, span.stop)
                for parent, span in zip(call.parents, plan.parents, strict=True)
            ],
            self.block_size,
        )
        request.prompt_token_ids = padded + request.prompt_token_ids
        request._all_token_ids[:0] = padded
        request.num_prompt_tokens = len(request.prompt_token_ids)
        # One slot stays free: the last sampled token must fit when it is encoded.
        room = self.max_model_len - max(plan.base, plan.new_offset) - num_new_tokens - 1
        request.max_tokens = max(1, min(request.max_tokens, room))

    def is_ready(self, call: Call) -> bool:
        """Whether all that the call reads exists, at the latest in the step being planned.

        A parent whose last tokens are encoded in the same step counts: in every layer all keys
        and values of a batch are stored before any query reads.
        """
        if call.admitted:  # it holds the blocks already
            return True
        return call.plan is not None and all(parent.is_resident for parent in call.parents)

    def missing(self, call: Call) -> list[Message]:
        """Parents that must be encoded again, and that nobody encodes yet."""
        return [p for p in call.parents if p.is_known and not p.is_resident and not p.encoder]

    def runs_in_circles(self, call: Call) -> bool:
        """Whether more was encoded again for this call than its recipes hold, several times over.

        That happens when what must be resident together does not fit into the pool: each
        encoding evicts what the one before it made.
        """
        if call.num_served <= _ROUNDS:
            return False
        recipes, frontier = set(call.parents), list(call.parents)
        while frontier:
            fresh = [p for p in frontier.pop().parents if p not in recipes]
            recipes.update(fresh)
            frontier += fresh
        return call.num_served > _ROUNDS * len(recipes)

    def span_blocks(self, message: Message, span: ParentPlan) -> list[Any]:
        """The blocks in which a span of a resident message lies."""
        return message.blocks[span.start // self.block_size : -(-span.stop // self.block_size)]

    def parent_blocks(self, call: Call) -> list[Any]:
        """The blocks with which the call's block table starts."""
        assert call.plan is not None
        return [
            block
            for message, span in zip(call.parents, call.plan.parents, strict=True)
            for block in self.span_blocks(message, span)
        ]

    def share_twin(self, call: Call) -> None:
        """Let a call that is about to start begin with what a message of the same recipe has."""
        message, params = call.message, call.beneficiary.params
        # A copy that is encoded for the first time is a new message, too.
        is_new = not call.is_internal or message.num_unreported > 0
        if message.is_known and not message.num_encoded and is_new:
            self.store.share(message, params.deny if params else ())
            call.num_shared = message.num_encoded
            if message.copied:
                message.num_unreported = message.num_tokens - message.num_encoded

    def own_blocks(self, call: Call) -> list[Any]:
        """Full blocks of the call's own message that exist, and need not be encoded again."""
        # At least one token is left to run: a request without any cannot be scheduled.
        num_reused = max(0, min(call.message.num_encoded, call.message.num_tokens - 1))
        return call.message.blocks[: num_reused // self.block_size]

    def take_over(self, call: Call, finished: Call) -> None:
        """`call` goes on in the blocks of `finished`: it reads its parents where they lie."""
        call.admitted, call.stored_positions = True, finished.stored_positions
        for parent in call.parents:
            parent.num_waiting -= 1
            parent.num_readers += 1

    def scheduled(self, call: Call, blocks: Sequence[Any], up_to: int) -> None:
        """The call got slots: it runs `blocks`, and the step encodes tokens before `up_to`."""
        assert call.plan is not None
        if not call.admitted:
            call.admitted = True
            if call.stored_positions is None:
                call.stored_positions = [parent.stored_position for parent in call.parents]
            for parent in call.parents:
                parent.num_waiting -= 1
                parent.num_readers += 1
                self.store.use(parent)
        message = call.message
        if message.is_known and not message.is_resident:
            num_encoded = up_to - call.plan.base
            if num_encoded >= message.num_tokens:
                own = blocks[call.plan.base // self.block_size :]
                self.store.hold(message, own, message.num_tokens)

    def preempted(self, call: Call) -> None:
        """The call lost its blocks; it waits again, and its parents may be evicted meanwhile."""
        if call.admitted:
            call.admitted, call.stored_positions = False, None
            for parent in call.parents:
                parent.num_readers -= 1
                parent.num_waiting += 1

    def close(self, call: Call, failure: str | None) -> None:
        """The request ended; `failure` says why there is no message, if there is none."""
        del self.calls[call.request.request_id]
        for parent in call.parents:
            if call.admitted:
                parent.num_readers -= 1
            else:
                parent.num_waiting -= 1
            self.store.settle(parent)
        message = call.message
        message.encoder = None
        if failure and not call.is_internal and not message.is_resident:
            message.failure = failure
        self.store.settle(message)

    def finish_decode(self, call: Call, blocks: Sequence[Any]) -> None:
        """Generation ended: header and all sampled tokens are the message.

        The last token has been sampled but not run, and with asynchronous scheduling no more
        than that is certain. A request that ended while it was preempted holds no blocks: its
        message is known, and is encoded when it is read.
        """
        assert call.plan is not None
        request, base = call.request, call.plan.base
        call.message.token_ids = list(request.all_token_ids[base:])
        if call.params and call.params.open_end:
            call.message.open_report = self.report(call)
        else:
            self.store.known(call.message)
        if not call.admitted:
            return
        num_encoded = min(request.num_computed_tokens, request.num_tokens - 1) - base
        self.store.hold(call.message, blocks[base // self.block_size :], num_encoded)

    def spans(self, call: Call) -> RequestSpans:
        """What the worker must know; valid for as long as the call stays admitted."""
        assert call.plan is not None and call.stored_positions is not None
        return request_spans(call.plan, call.stored_positions, self.block_size)

    def report(self, call: Call) -> dict[str, Any]:
        """What a result says of itself, besides text."""
        plan = call.plan
        assert plan is not None
        num_copied = self._take_unreported(call)
        num_reused = sum(span.num_tokens for span in plan.parents) - num_copied
        return {
            "id": call.message.id,
            "num_tokens": call.message.num_tokens,
            "position": plan.new_offset,
            "exact": plan.exact,
            "reused_tokens": num_reused + call.num_shared,
            "repositioned_tokens": sum(
                span.num_tokens
                for span, parent in zip(plan.parents, call.parents, strict=True)
                if parent.plan and span.offset - span.start != parent.plan.new_offset
            ),
            "encoded_tokens": num_copied + call.message.num_tokens - call.num_shared,
        }

    def _take_unreported(self, call: Call) -> int:
        """Tokens of the copies that were encoded for this call; no later call reports them."""
        num_tokens = sum(parent.num_unreported for parent in call.parents)
        params = call.request.sampling_params
        # With stop strings nobody reads the report, unless the client asks for it ("end").
        is_read = (call.params and call.params.open_end) or not (params and params.stop)
        if call.admitted and is_read:
            for parent in call.parents:
                parent.num_unreported = 0
        return num_tokens


def _check_options(request: Request) -> None:
    """Refuse what would not make one message of the tokens that the caller sees."""
    if not request.prompt_token_ids:
        raise EmptyTokensError("a call needs at least one new token", parameter="tokens", value=[])
    params = request.sampling_params
    if params is None:
        raise UnsupportedOptionError(
            "only generation can be choreographed", parameter="pooling_params", value=None
        )
    unsupported = {
        "prompt_logprobs": params.prompt_logprobs,
        "prompt_embeds": request.prompt_embeds,
        "mm_features": request.mm_features or None,
        "resumable": request.resumable or None,
    }
    for name, value in unsupported.items():
        if value is not None:
            raise UnsupportedOptionError(
                "choreographed calls do not support this; leave it out",
                parameter=name,
                value=value if name == "prompt_logprobs" else "given",
            )
