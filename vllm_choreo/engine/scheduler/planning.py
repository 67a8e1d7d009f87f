# SPDX-License-Identifier: Apache-2.0
"""Planning of a call whose parents are known, and the virtual sequence in its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_choreo.engine.scheduler.composing import check_composable, check_whole
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall, Watching
from vllm_choreo.errors import ChainError, RepairError
from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.rules import ByAttention, ByLayers, Reweighted, Rule, Seen
from vllm_choreo.repair.runs import TokenRanges
from vllm_choreo.semantics.positions import (
    CallPlan,
    check_length,
    check_text_offsets,
    resolve_offsets,
    resolve_span,
    virtual_tokens,
)
from vllm_choreo.store.copies import Context, Link
from vllm_choreo.store.encoding import Adapter, Encoding
from vllm_choreo.store.exact import exact_chain, is_exact, num_in_chain
from vllm_choreo.store.hidden import asked_layers, needed
from vllm_choreo.store.repaired import repaired_chain
from vllm_choreo.store.store import MessageStore


class _Listed(NamedTuple):
    """Parents that a call lists, unrepaired, and the position at which the call stands.

    Attributes:
        links: the parents, each with its span.
        offsets: positions at which the call sees them.
        new_offset: position of the call's own first token.
        plan: positions of a call that reads them so.
    """

    links: list[Link]
    offsets: Sequence[int]
    new_offset: int
    plan: CallPlan


def _listed(call: ScheduledCall, store: MessageStore, max_model_len: int) -> _Listed:
    """Resolve the spans and offsets that a call lists.

    Raises:
        ChoreoError: it does not fit, or is no text in exact mode.
    """
    params = call.params
    assert params is not None, "what is encoded again has its plan"
    links = [
        Link(parent, *resolve_span(named.start, named.stop, parent.num_tokens, named.id))
        for named, parent in zip(params.parents, call.parents, strict=True)
    ]
    lengths = [link.num_tokens for link in links]
    offsets, new_offset = resolve_offsets(lengths, params.offsets, params.new_offset)
    if params.exact:
        check_text_offsets(lengths, offsets, new_offset, from_zero=store.is_placed)
    # What an exact call reads begins with the first token of an encoding: of a copy, if need be.
    listed = [Link(link.encoding, 0, link.num_tokens) for link in links] if params.exact else links
    plan = Context(listed, offsets, call.encoding.adapter).plan(new_offset, store)
    num_new_tokens = call.request.num_prompt_tokens
    check_length(plan, num_new_tokens, max_model_len, generates=call.is_decode)
    return _Listed(links, offsets, new_offset, plan)


def watching_of(call: ScheduledCall, store: MessageStore, max_model_len: int) -> Watching | None:
    """Plan by which a call looks at its parents before it is repaired; None: it need not.

    Raises:
        ChoreoError: it does not fit, or cannot be repaired so.
    """
    rule = call.params.repair if call.params else None
    if not isinstance(rule, ByAttention) or not rule.share:
        return None
    _check_repairable(rule, store)
    needed(store.hidden, "repair", rule.to_json())
    listed = _listed(call, store, max_model_len)
    if num_in_chain(listed.links, listed.offsets, call.encoding.adapter) == len(listed.links):
        return None
    return Watching(listed.plan)


def plan_call(
    call: ScheduledCall, store: MessageStore, max_model_len: int
) -> tuple[CallPlan, tuple[Encoding, ...]]:
    """Plan a call: its positions, and the encodings it reads for the parents that it lists.

    Raises:
        ChoreoError: it does not fit, or is no text in exact mode.
    """
    params, adapter = call.params, call.encoding.adapter
    assert params is not None, "what is encoded again has its plan"
    links, offsets, new_offset, _ = _listed(call, store, max_model_len)
    num_repaired = 0
    if params.exact:
        links = exact_chain(links, adapter, store)
    elif params.repair is not None:
        _check_repairable(params.repair, store)
        runs = params.repair.runs(_seen(call, links, offsets), store.block_size)
        if store.states is not None:
            check_whole(links)
            _check_first_tokens(runs, params.repair)
        layers = _layers(params.repair, store)
        read = repaired_chain(links, offsets, runs, adapter, store, layers)
        links, offsets, num_repaired = read
    plan = replace(
        Context(links, offsets, adapter).plan(new_offset, store),
        exact=is_exact(
            *(links, offsets, new_offset, adapter),
            from_zero=store.is_placed,
            whole=store.states is not None,
        ),
        repaired_tokens=num_repaired,
    )
    if store.states is not None and not plan.exact:
        if not store.states.is_composed:
            raise _chain_error(links, offsets, adapter)
        check_composable(store.states, links)
    if len(links) > len(params.parents):  # read in two, which takes more blocks
        for link in links:
            own = link.encoding.plan
            assert own is not None
            check_length(own, link.num_tokens, max_model_len)
        num_new_tokens = call.request.num_prompt_tokens
        check_length(plan, num_new_tokens, max_model_len, generates=call.is_decode)
    if isinstance(params.repair, Reweighted) and len(links) > 1:
        plan = replace(plan, exact=False, weights=params.repair.weights)
    return plan, tuple(link.encoding for link in links)


def _chain_error(
    links: Sequence[Link], offsets: Sequence[int], adapter: Adapter | None
) -> ChainError:
    """Error of a call whose parents are no chain, to a model that reads chains alone."""
    number = num_in_chain(links, offsets, adapter, whole=True)
    way_out = (
        "this model keeps a state, and reads messages in the order of their encoding alone; call "
        "with mode='exact', which encodes anew what does not follow, or start the engine with "
        "additional_config.choreo.composed_states"
    )
    if number == len(links):
        return ChainError(
            f"there is a gap or an overlap between the parents, or behind them: {way_out}, and "
            "without offsets",
            parameter="offsets",
            value=list(offsets),
        )
    link = links[number]
    is_part = link.num_tokens != link.encoding.num_tokens
    found = "only a part of it is named" if is_part else "it was not encoded right behind these"
    return ChainError(
        f"parent {number + 1} does not continue the chain of those before it ({found}): {way_out}",
        parameter="parents",
        value=link.encoding.message.id,
    )


def _seen(call: ScheduledCall, links: Sequence[Link], offsets: Sequence[int]) -> list[Seen]:
    """Spans that a repair rule chooses from, with the attention they got, if a call looked."""
    seen = [Seen(link.start, link.stop) for link in links]
    if call.watching is None:
        return seen
    assert call.watching.attention is not None, "it is planned when it has looked"
    first = num_in_chain(links, offsets, call.encoding.adapter)
    changed = zip(seen[first:], call.watching.attention[first:], strict=True)
    return seen[:first] + [s._replace(attention=attention) for s, attention in changed]


def _check_repairable(rule: Rule, store: MessageStore) -> None:
    """Check that calls to this model can be repaired, or raise a RepairError."""
    is_by_tokens = not isinstance(rule, ByAttention | ByLayers | Reweighted)
    if store.states is not None and not (store.states.is_composed and is_by_tokens):
        raise RepairError(
            "this model keeps a state that all tokens have changed: the first tokens of parents "
            "('first:32') can be encoded anew in an engine that composes states "
            "(additional_config.choreo.composed_states), and nothing else; call without repair, "
            "or with mode='exact'",
            parameter="repair",
            value=rule.to_json(),
        )
    if store.is_placed:
        raise RepairError(
            "this model scales queries by their position, so that tokens encoded elsewhere "
            "cannot stand beside repaired ones; call without repair, or with mode='exact'",
            parameter="repair",
            value=rule.to_json(),
        )


def _check_first_tokens(runs: Sequence[TokenRanges], rule: Rule) -> None:
    """Check that only first tokens are encoded anew, or raise a RepairError."""
    for number, of_parent in enumerate(runs, 1):
        if len(of_parent) > 1 or any(start for start, _ in of_parent):
            raise RepairError(
                f"of parent {number} other tokens than the first ones are to be encoded anew, "
                "which a state that all tokens have changed cannot tell apart; give the first "
                "ones alone, as 'first:32' does",
                parameter="repair",
                value=rule.to_json(),
            )


def _layers(rule: Rule, store: MessageStore) -> LayerRanges | None:
    """Layers in which a rule repairs; None: all.

    Raises:
        ChoreoError: these layers cannot be run.
    """
    return asked_layers(rule, store.hidden) if isinstance(rule, ByLayers) else None


def write_virtual_sequence(call: ScheduledCall, block_size: int, max_model_len: int) -> None:
    """Put the padded tokens of a call's parents before the new tokens of its request."""
    plan, request = call.plan, call.request
    assert plan is not None and request.prompt_token_ids is not None
    num_new_tokens = request.num_prompt_tokens
    padded = virtual_tokens(
        [
            (parent.token_ids or (), span.start, span.stop)
            for parent, span in zip(call.parents, plan.parents, strict=True)
        ],
        block_size,
    )
    request.prompt_token_ids = padded + request.prompt_token_ids
    request._all_token_ids[:0] = padded
    request.num_prompt_tokens = len(request.prompt_token_ids)
    # One slot stays free: vLLM samples a token when the last one is encoded.
    most_tokens = max_model_len - max(plan.base, plan.new_offset) - num_new_tokens - 1
    request.max_tokens = max(1, min(request.max_tokens, most_tokens))
