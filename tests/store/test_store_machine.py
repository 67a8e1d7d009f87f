# SPDX-License-Identifier: Apache-2.0
"""A long random life of a store: after every step, counts and blocks are those of a recount.

The machine plays the scheduler: steps are planned and run; calls are opened, wait, are scheduled,
preempted, end; messages are forked, copied into other contexts or patched there (as exact mode and
repairs do), shared, evicted, saved, restored, loaded, pinned, freed. What every call holds is
written down beside the store, and compared; and so is what lies in every block once the copies and
writes of a step have been done.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.store.test_store import SIZE, Block, Pool
from vllm_choreo.errors import LimitError
from vllm_choreo.repair.runs import TokenRange, TokenRanges, merge_ranges
from vllm_choreo.store.copies import Context, Link
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.exact import exact_chain
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.repaired import repaired_chain
from vllm_choreo.store.session_copies import SessionCopies
from vllm_choreo.store.store import MessageStore

INDEX = st.integers(0, 1000)
HOST_BLOCKS = 9


class ReusedPool(Pool):
    """Gives away first what was freed first, as vLLM's does."""

    def new(self, count: int) -> list[Block]:
        free = [block for block in self.blocks if not block.ref_cnt][:count]
        self.touch(free)
        return free + super().new(count - len(free))


def tag(encoding: Encoding, number: int) -> Any:
    """What lies in a block of an encoding: the same for those of equal digests."""
    patch = encoding.patch
    if patch is not None:
        first, stop = number * SIZE, (number + 1) * SIZE
        if not any(start < stop and first < end for start, end in patch.runs):
            return tag(patch.source, number)
    return encoding.digest, number


@dataclass(eq=False)
class Call:
    """A call as the recount has it.

    Attributes:
        reads: what it waits for, or reads.
        encoding: what it makes or encodes again.
        id: of its request.
        run: of a patch: what it writes.
        blocks: of the request, once it is scheduled.
        is_new: it was scheduled in the step that is being planned.
    """

    reads: list[Encoding]
    encoding: Encoding
    id: str
    run: TokenRange | None = None
    blocks: list[Block] | None = None
    is_new: bool = False


def _place(encoding: Encoding, links: list[Link], store: MessageStore) -> None:
    """Right behind its parents, as text has it."""
    *offsets, position = accumulate((link.num_tokens for link in links), initial=0)
    context = Context(links, offsets, None)
    encoding.parents, encoding.plan = context.encodings, context.plan(position, store)


def _drawn_runs(data: st.DataObject, num_tokens: int) -> TokenRanges:
    ends = data.draw(st.lists(st.integers(0, num_tokens), min_size=2, max_size=4, unique=True))
    ends.sort()
    return merge_ranges(zip(ends[::2], ends[1::2], strict=False))


class StoreMachine(RuleBasedStateMachine):
    """Rules do what the scheduler may do next; indices choose among what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReusedPool()
        self.store = MessageStore(self.pool, SIZE, session_copies=SessionCopies(4, 60))
        self.store.tier = HostTier(HOST_BLOCKS, self.store.residency.block_copies)
        self.is_planning = False
        # What lies in blocks of the KV cache and of the host, by their numbers, and what the step
        # being planned will write: block, and what it is.
        self.cache: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.writes: list[tuple[int, Any]] = []
        self.calls: list[Call] = []
        self.seen: list[Encoding] = []  # all that ever were
        self.names = self.num_requests = 0

    # -- calls -----------------------------------------------------------------------------

    @rule(
        num_tokens=st.integers(1, 11),
        parents=st.lists(INDEX, max_size=3),
        tenant=st.sampled_from("ab"),
        mode=st.sampled_from(["as stored", "exact", "repaired"]),
        data=st.data(),
    )
    def open(
        self, num_tokens: int, parents: list[int], tenant: str, mode: str, data: st.DataObject
    ) -> None:
        """A prefill; its parents are read as copies where it says so."""
        known = [m.own for m in self.store.messages(tenant) if m.own.is_known and m.own.digest]
        chosen = [known[i % len(known)] for i in parents] if known else []
        links = [Link(encoding, 0, encoding.num_tokens) for encoding in chosen]
        try:
            if mode == "exact":
                links = exact_chain(links, None, self.store)
            elif mode == "repaired":
                runs = [_drawn_runs(data, link.num_tokens) for link in links]
                offsets = list(accumulate((link.num_tokens for link in links), initial=0))
                links, *_ = repaired_chain(links, offsets[:-1], runs, None, self.store)
        except LimitError:  # calls need all copies of the session
            copies = [c for m in self.store.messages(tenant) for c in m.copies.values()]
            assert any(copy.in_use or copy.num_wanting for copy in copies)
            return
        self.names += 1
        encoding = self.store.create(tenant, f"m{self.names}", tenant=tenant).own
        encoding.token_ids = [num_tokens] * num_tokens
        _place(encoding, links, self.store)
        self.store.identify(encoding)
        self._enter(encoding)

    def _enter(self, encoding: Encoding, run: TokenRange | None = None) -> None:
        self.num_requests += 1
        call = Call(list(encoding.parents), encoding, f"r{self.num_requests}", run)
        if run is not None:
            call.reads.append(encoding)
        self.store.residency.add_encoder(encoding, call.id)
        self.store.residency.wait_for(call.reads)
        self.calls.append(call)
        self.seen += [e for e in (encoding, *encoding.parents) if e not in self.seen]

    @rule(index=INDEX)
    def encode_again(self, index: int) -> None:
        """Evicted, or a copy that nobody has encoded yet."""
        wanted = [e for e in self._lacking() if e.patch is None]
        if wanted:
            self._enter(wanted[index % len(wanted)])

    @rule(index=INDEX)
    def patch(self, index: int) -> None:
        """A patch gets its place over its source, and a request for each of its runs."""
        wanted = [e for e in self._lacking() if e.patch and e.patch.source.is_resident]
        if not wanted:
            return
        encoding = wanted[index % len(wanted)]
        assert encoding.patch is not None
        if not self.is_planning:
            return
        source, runs = encoding.patch.source, encoding.patch.runs
        blocks = source.held_blocks
        touched = {n for start, stop in runs for n in range(start // SIZE, -(-stop // SIZE))}
        new = self.pool.new(len(touched))
        for n, block in zip(touched, new, strict=True):
            blocks[n] = block
        self.store.residency.patch(encoding, [blocks], source.stored_position, self.store.step)
        self.pool.free_blocks(new)
        for n, block in zip(touched, new, strict=True):
            self.store.residency.block_copies.move(source.held_blocks[n], block, 0)
        self.store.settle(source)
        for run in runs:
            self._enter(encoding, run)

    def _lacking(self) -> list[Encoding]:
        """What is not resident, and may be encoded again."""
        lacking = [
            e for e in self.seen if e.is_known and e.plan and not e.is_resident and not e.encoders
        ]
        return [e for e in lacking if not e.is_given_up or e.num_waiting]

    @rule(index=INDEX)
    def admit(self, index: int) -> None:
        """A call whose parents are all there starts, from a twin's blocks if there is one."""
        if not self.is_planning:
            return
        ready = [
            call
            for call in self.calls
            if call.blocks is None
            and all(parent.is_resident for parent in call.encoding.parents)
            and (call.run is None or call.encoding.unwritten[:1] == [call.run])
        ]
        if not ready:
            return
        call = ready[index % len(ready)]
        encoding, call.is_new = call.encoding, True
        if call.run is not None:
            call.blocks = [block for parent in call.reads for block in parent.held_blocks]
            self.pool.touch(call.blocks)
            self.store.residency.read(call.reads)
            self.store.on_written(encoding, call.run)
            first, stop = call.run
            touched = range(first // SIZE, -(-stop // SIZE))
            self.writes += [(encoding.held_blocks[n].block_id, tag(encoding, n)) for n in touched]
            return
        if not encoding.num_encoded and not encoding.is_given_up:
            self.store.share(encoding)
        adopted = [block for parent in call.reads for block in parent.held_blocks]
        num_reused = min(encoding.num_encoded, encoding.num_tokens - 1) // SIZE
        adopted_own = encoding.held_blocks[:num_reused]
        self.pool.touch([*adopted, *adopted_own])
        own = [*adopted_own, *self.pool.new(-(-encoding.num_tokens // SIZE) - num_reused)]
        call.blocks = [*adopted, *own]
        self.store.residency.read(call.reads)
        if not encoding.is_resident:
            self.store.hold(encoding, [own], encoding.num_tokens)
        written = enumerate(own[num_reused:], num_reused)
        self.writes += [(block.block_id, tag(encoding, n)) for n, block in written]

    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        running = [call for call in self.calls if call.blocks is not None and not call.is_new]
        if running:
            call = running[index % len(running)]
            self.pool.free_blocks(reversed(call.blocks or []))
            call.blocks = None
            self.store.residency.wait_again(call.reads)

    @rule(index=INDEX)
    def end(self, index: int) -> None:
        """A call ends, or is aborted while it waits."""
        ending = [call for call in self.calls if not call.is_new]
        if not ending:
            return
        call = ending[index % len(ending)]
        self.calls.remove(call)
        self.pool.free_blocks(reversed(call.blocks or []))
        self.store.residency.leave(call.reads, reading=call.blocks is not None)
        for parent in call.reads:
            self.store.settle(parent)
        self.store.residency.remove_encoder(call.encoding, call.id)
        if call.encoding.unwritten and not call.encoding.encoders:
            self.store.residency.drop(call.encoding)  # as the call table does
        self.store.settle(call.encoding)

    # -- memory ----------------------------------------------------------------------------

    @precondition(lambda self: not self.is_planning)
    @rule()
    def begin_step(self) -> None:
        self.store.begin_step()
        self.is_planning = True

    @precondition(lambda self: self.is_planning)
    @rule()
    def run_step(self) -> None:
        """The step that was planned runs: its copies are done, then it writes."""
        copies = self.store.take_block_copies()
        self.is_planning = False
        for call in self.calls:  # before anything is checked, or what fails never ends
            call.is_new = False
        targets = [target for _, target in copies.loads] + [
            target for _, target, *_ in copies.moves
        ]
        assert len(targets) == len({*targets})
        # What a patch alone is made of has no owner left, and is nobody else's before the step ran.
        sources = {source for source, *_ in copies.moves}
        assert all(self.pool.blocks[t].ref_cnt or t in sources for t in targets)
        for source, host_block in copies.saves:
            self.host[host_block] = self.cache.get(source)
        for host_block, target in copies.loads:
            self.cache[target] = self.host.get(host_block)
        moved = [(target, self.cache.get(source)) for source, target, *_ in copies.moves]
        self.cache.update([*moved, *self.writes])
        self.writes = []
        for encoding in self.seen:
            if encoding.is_resident:
                lying = [self.cache.get(block.block_id) for block in encoding.held_blocks]
                assert lying == [tag(encoding, n) for n in range(encoding.num_blocks)]

    @precondition(lambda self: not self.is_planning)
    @rule(num_tokens=st.integers(1, 11), tenant=st.sampled_from("ab"), into_host=st.booleans())
    def load(self, num_tokens: int, tenant: str, into_host: bool) -> None:
        """A message comes with its keys and values, which are written at once, between steps."""
        self.names += 1
        encoding = self.store.create(tenant, f"m{self.names}", tenant=tenant).own
        encoding.token_ids = [100 + self.names] * num_tokens
        _place(encoding, [], self.store)
        self.store.identify(encoding)
        self.store.duplicates.add(encoding)
        self.seen.append(encoding)
        need = -(-num_tokens // SIZE)
        tags = [tag(encoding, n) for n in range(need)]
        if into_host and self.store.tier is not None:
            if copy := self.store.tier.reserve(encoding, [range(need)], num_tokens, 0):
                self.host.update(zip(copy.host_blocks, tags, strict=True))
                self.store.tier.on_filled(encoding)
            return
        blocks = self.pool.new(need)
        self.store.hold(encoding, [blocks], num_tokens)
        self.pool.free_blocks(blocks)
        self.cache.update(zip((block.block_id for block in blocks), tags, strict=True))

    @rule(index=INDEX)
    def evict(self, index: int) -> None:
        idle = [e for e in self.seen if e.blocks and not e.num_readers and not e.encoders]
        if idle:
            self.store.evict(idle[index % len(idle)])

    @rule(waiting_too=st.booleans(), into_host=st.booleans())
    def make_room(self, waiting_too: bool, into_host: bool) -> None:
        needed: list[set[Encoding]] = [{c.encoding, *c.reads} for c in self.calls[:1]]
        self.store.evict_one(needed, waiting_too, into_host=into_host)

    @rule(num_blocks=st.integers(1, 9))
    def enforce_share(self, num_blocks: int) -> None:
        self.store.enforce_share(num_blocks)

    @rule(index=INDEX)
    def restore(self, index: int) -> None:
        tier = self.store.tier
        assert tier is not None
        if not self.is_planning:
            return
        saved = [e for e in self.seen if e in tier and not e.num_encoded and not e.encoders]
        if saved:
            encoding = saved[index % len(saved)]
            tier.protect(encoding)
            blocks = self.pool.new(len(tier.restorable(encoding)))
            self.store.restore(encoding, blocks)
            self.pool.free_blocks(blocks)

    @rule(index=INDEX)
    def pin(self, index: int) -> None:
        if messages := self.store.messages():
            self.store.pin([messages[index % len(messages)]], 1e9, 10**9)

    @precondition(lambda self: self.names > 20)
    @rule()
    def empty(self) -> None:
        self.store.empty()

    @rule(index=INDEX)
    def free(self, index: int) -> None:
        if messages := self.store.messages():
            self.store.free(messages[index % len(messages)])

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def every_reference_is_somebodys(self) -> None:
        held: dict[Any, int] = {}
        of_calls = [block for call in self.calls for block in call.blocks or []]
        copies = self.store.residency.block_copies
        pending = [source for source, *_ in copies._moves.values()]
        pending += [] if self.is_planning else copies._saves.values()
        for block in [*of_calls, *pending, *(b for e in self.seen for b in e.held_blocks)]:
            held[block] = held.get(block, 0) + 1
        assert all(block.ref_cnt == held.get(block, 0) for block in self.pool.blocks)
        assert set(self.store.residency.holding()) == {e for e in self.seen if e.blocks}
        self.store.residency.check()

    @invariant()
    def every_count_is_that_of_the_calls(self) -> None:
        for encoding in self.seen:
            waiting = sum(c.reads.count(encoding) for c in self.calls if c.blocks is None)
            reading = sum(c.reads.count(encoding) for c in self.calls if c.blocks is not None)
            assert (encoding.num_waiting, encoding.num_readers) == (waiting, reading)
            assert encoding.encoders == {c.id for c in self.calls if c.encoding is encoding}

    @invariant()
    def copies_are_counted_and_within_their_limits(self) -> None:
        copies = [c for m in self.store.messages() for c in m.copies.values()]
        self.store.session_copies.check(copies)
        for tenant in "ab":
            of_tenant = [copy for copy in copies if copy.message.session == tenant]
            assert len(of_tenant) <= 4
            assert sum(copy.num_tokens + len(copy.parents) for copy in of_tenant) <= 60

    @invariant()
    def what_is_given_up_and_idle_holds_nothing(self) -> None:
        for encoding in self.seen:
            # A patch that a call waits for is laid over its source, given up or not.
            if encoding.is_given_up and not encoding.in_use and not encoding.num_wanting:
                assert not encoding.blocks and encoding not in (self.store.tier or ())
                assert encoding not in list(self.store.duplicates)
        assert all(
            all(copy in parent.readers for parent in copy.parents)
            for message in self.store.messages()
            for copy in message.copies.values()
        )

    def teardown(self) -> None:
        if self.is_planning:
            self.run_step()
        while self.calls:
            self.end(0)
        for message in self.store.messages():
            self.store.free(message)
        self.begin_step()
        self.run_step()
        assert all(block.ref_cnt == 0 for block in self.pool.blocks)
        assert not list(self.store.duplicates) and not self.store.residency.holding()
        assert self.store.tier is not None and self.store.tier.num_used == 0


StoreMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
TestStore = StoreMachine.TestCase


def test_a_span_of_a_copy_is_a_copy_of_its_tokens() -> None:
    """What the machine leaves out: parts of messages."""
    store = MessageStore(Pool(), SIZE)
    encoding = store.create("s", "m").own
    encoding.token_ids = [1, 2, 3]
    _place(encoding, [], store)
    store.identify(encoding)
    (link,) = exact_chain([Link(encoding, 1, 3)], None, store)
    assert link.encoding.token_ids == [2, 3] and link.encoding.is_copy
    assert exact_chain([Link(encoding, 1, 3)], None, store) == [link]
