# SPDX-License-Identifier: Apache-2.0
"""The recount: what must hold of a scheduler after every step, and what may be left at the end.

Counted anew from who holds what, not from the counts that the store keeps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any


class Broken(AssertionError):
    """A law of the recount does not hold; `law` names it."""

    def __init__(self, law: str, detail: Any = "") -> None:
        super().__init__(f"{law}: {detail}" if detail else law)
        self.law = law


def check(scheduler: Any) -> None:
    """After a step, or an operation between steps. Raises Broken."""
    store = scheduler.store
    encodings = _all_encodings(scheduler)
    _check_blocks(scheduler)
    _check_groups(scheduler)
    if store.groups.has_windows:
        for call in scheduler.call_table.calls.values():
            if call.is_scheduled:
                _check_seen(scheduler, call)
    if store.states is not None:
        _check_states(scheduler)
    try:
        store.residency.check()
    except AssertionError as error:
        raise Broken("residency.check() fails", error) from error
    _check_counts(scheduler, encodings)
    if store.tier is not None:
        _check_host(store.tier, store.residency.block_copies)
    if store.hidden is not None:
        _check_hidden(store)
    # A patch that is read may lose its place, and needs its source then.
    sources = {e.patch.source for e in encodings if e.patch and e.in_use}
    for encoding in encodings - sources:
        if encoding.is_given_up and not encoding.in_use:
            if encoding.blocks or encoding.state:
                raise Broken("what is given up and idle holds blocks", encoding.message.id)
            if store.tier is not None and encoding in store.tier:
                raise Broken("what is given up and idle lies in host memory", encoding.message.id)


def check_nothing_is_left(scheduler: Any) -> None:
    """All sessions were closed, and everything was answered. Raises Broken."""
    if scheduler.store.pictures and scheduler.store.pictures.num_bytes:
        gc.collect()  # messages and their encodings hold one another
    store, tier, hidden = scheduler.store, scheduler.store.tier, scheduler.store.hidden
    snapshots, states = scheduler.snapshots, store.states
    left = {
        "messages": store.messages(),
        "encodings hold blocks": store.residency.holding(),
        "calls": scheduler.call_table.calls,
        "requests": scheduler.requests,
        "duplicates": list(store.duplicates),
        "host blocks": tier.num_used if tier else 0,
        "states in host memory": states.tier.num_used if states and states.tier else 0,
        "hidden states": hidden.num_bytes if hidden else 0,
        "keys of hidden states": hidden._keys if hidden else (),
        "tickets of saves": (*snapshots._described, *snapshots._held),
        "tickets of loads": snapshots._loads,
        "refusals": scheduler.refusals,
        "failed messages": store._failed,
        "pictures that are saved": snapshots._pictures,
        "bytes of pictures": store.pictures.num_bytes if store.pictures else 0,
    }
    for what, found in left.items():
        if found:
            raise Broken(f"left at the end: {what}", _short(found))
    pool = scheduler.kv_cache_manager.block_pool
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        raise Broken("left at the end: blocks", pool.get_num_free_blocks())
    if states is not None and states.num_free != states.num_states:
        raise Broken("left at the end: states", states.num_free)


# -- what is counted -----------------------------------------------------------------------------


def _all_encodings(scheduler: Any) -> set[Any]:
    """All that somebody knows, and what these were made of."""
    store = scheduler.store
    frontier = [e for message in store.messages() for e in message.encodings]
    frontier += store.residency.holding()
    for call in scheduler.call_table.calls.values():
        frontier += [call.encoding, *call.reads]
    if store.tier is not None:
        frontier += store.tier._saved
    if store.hidden is not None:
        frontier += store.hidden._keys
    frontier += store.duplicates
    found: set[Any] = set()
    while frontier:
        encoding = frontier.pop()
        if encoding not in found:
            found.add(encoding)
            frontier += encoding.recipe
    return found


def _check_blocks(scheduler: Any) -> None:
    """Each reference is an encoding's, a request's, or that of an effect that is queued."""
    manager = scheduler.kv_cache_manager
    pool, held = manager.block_pool, Counter[int]()
    for encoding in scheduler.store.residency.holding():
        held.update(_block_ids(encoding.held_blocks))
    for of_group in manager.coordinator.single_type_managers:
        for blocks in of_group.req_to_blocks.values():
            held.update(_block_ids(blocks))
    for _, blocks in scheduler.deferred_frees:  # with a KV connector, until their step is over
        held.update(block.block_id for block in blocks)
    held.update(_block_ids(_queued(scheduler)))
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != held[block.block_id]:
            detail = f"block {block.block_id}: {block.ref_cnt}, not {held[block.block_id]}"
            raise Broken("a block's references are not its holders", detail)
    num_free = sum(block.ref_cnt == 0 and not block.is_null for block in pool.blocks)
    if pool.get_num_free_blocks() != num_free:
        raise Broken("the free blocks are not those without references")


def _check_groups(scheduler: Any) -> None:
    """A block is of one KV cache group at a time; gaps are in those with windows alone."""
    windows = scheduler.store.groups.windows
    of_block: dict[int, set[int]] = {}
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    holding = scheduler.store.residency.holding()
    tables = [blocks for encoding in holding for blocks in enumerate(encoding.blocks)]
    tables += [(g, blocks) for g, m in enumerate(managers) for blocks in m.req_to_blocks.values()]
    for group, blocks in tables:
        if windows[group] is None and any(block.is_null for block in blocks):
            raise Broken("a group without a window has gaps", blocks)
        for block in blocks:
            of_block.setdefault(block.block_id, set()).add(group)
    shared = {block for block, groups in of_block.items() if block and len(groups) > 1}
    if shared:
        raise Broken("a block is of two groups", shared)


def _check_seen(scheduler: Any, call: Any) -> None:
    """The block tables of a running call have all that its next token sees, by its definition."""
    plan, request, size = call.plan, call.request, scheduler.store.block_size
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    num_own = max(0, request.num_computed_tokens - request.num_in_flight_tokens - plan.base)
    placed, slot = [], 0  # virtual index and position of each token that it may see
    for span in plan.parents:
        slot += span.start % size
        placed += [(slot + n, span.offset + n) for n in range(span.num_tokens)]
        slot = -(-(slot + span.num_tokens) // size) * size
    placed += [(plan.base + n, plan.new_offset + n) for n in range(num_own)]
    for window, manager in zip(scheduler.store.groups.windows, managers, strict=True):
        table, position = manager.req_to_blocks[call.id], plan.new_offset + num_own
        seen = [index for index, at in placed if window is None or position - at < window]
        if any(table[index // size].is_null for index in seen):
            raise Broken("a call has lost what it sees", call.encoding.message.id)


def _check_states(scheduler: Any) -> None:
    """Each reference on a state is an encoding's, a running request's, or a queued copy's."""
    states, held = scheduler.store.states, Counter[int]()
    for encoding in states.holding():
        held[encoding.state.block_id] += 1
        if not encoding.is_resident:
            raise Broken("an encoding has a state, and not its keys", encoding.message.id)
    for request_id, state in states._of_request.items():
        held[state.block_id] += 1
        if request_id not in scheduler.requests:
            raise Broken("a request that has ended holds a state", request_id)
    held.update(source.block_id for source in states.starts.sources)
    held.update(state.block_id for state in scheduler.snapshots._kept_states.values())
    held.update(source.block_id for source in states.copies._saves.values())
    if states.tier is not None:
        _check_host(states.tier, states.copies)
    for state in states.pool.blocks:
        if not state.is_null and state.ref_cnt != held[state.block_id]:
            detail = f"state {state.block_id}: {state.ref_cnt}, not {held[state.block_id]}"
            raise Broken("a state's references are not its holders", detail)


def _queued(scheduler: Any) -> Iterable[Any]:
    """Blocks that are held for what the next step does."""
    copies = scheduler.store.residency.block_copies
    yield from copies._saves.values()
    yield from (source for source, *_ in copies._moves.values())
    yield from scheduler.patcher.stager._held


def _block_ids(blocks: Iterable[Any]) -> Iterable[int]:
    return (block.block_id for block in blocks)


def _check_counts(scheduler: Any, encodings: set[Any]) -> None:
    """Who waits for an encoding, reads it, makes it."""
    snapshots = scheduler.snapshots
    waiting, reading, making = Counter[Any](), Counter[Any](), Counter[Any]()
    for call in scheduler.call_table.calls.values():
        (reading if call.is_scheduled else waiting).update(call.reads)
        if call.is_scheduled and not all(parent.is_resident for parent in call.parents):
            raise Broken("a call reads what is not there", call.encoding.message.id)
        making[call.encoding] += 1
    reading.update(snapshots._held.values())
    placed = {e for rebuilt in snapshots._loads.values() for e in rebuilt.encodings if e.blocks}
    reading.update(placed)
    for encoding in encodings | placed:
        counted = (waiting[encoding], reading[encoding], making[encoding])
        found = (encoding.num_waiting, encoding.num_readers, len(encoding.encoders))
        if counted != found:
            detail = f"{encoding.message.id}: {found}, not {counted} (waiting, reading, making)"
            raise Broken("an encoding's counts are not those of the calls", detail)
    wanting = [encoding for encoding in encodings | placed if encoding.wants_source]
    patched = Counter(patch.patch.source for patch in wanting)
    entered = Counter(patch.patch.source for patch in wanting if patch.patch.is_entering)
    for encoding in encodings | placed:
        found = (encoding.num_wanting, encoding.num_entering)
        if found != (patched[encoding], entered[encoding]):
            raise Broken("an encoding's patches are not those that want it", encoding.message.id)


def _check_host(tier: Any, copies: Any) -> None:
    """Each host block is free, or one encoding's; what is to be saved there is that encoding."""
    blocks = Counter(tier._free)
    for saved in tier._saved.values():
        blocks.update(saved.host_blocks)
    if set(blocks) != set(range(tier.num_blocks)) or max(blocks.values(), default=1) > 1:
        raise Broken("host blocks are lost, or two encodings lie in one", blocks)
    if lost := copies._saves.keys() & set(tier._free):
        raise Broken("a copy is queued into host blocks that are free", lost)


def _check_hidden(store: Any) -> None:
    hidden = store.hidden
    if hidden.num_bytes > hidden.max_bytes:
        raise Broken("more hidden states than there is memory for", hidden.num_bytes)


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) < 300 else text[:300] + "…"
