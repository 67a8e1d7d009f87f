# SPDX-License-Identifier: Apache-2.0
"""Messages and where their keys and values lie. Imports neither torch nor vllm.

A message's *recipe* (tokens, parents, offsets) is the truth; its KV blocks are a cache of it:

    generating --finish--> known, not resident --encode--> resident --evict--> known, not resident

The store holds one reference on every block of a resident message; calls that read it hold
their own, so a block returns to the pool when the last of them lets go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_choreo.errors import NameTakenError, UnknownMessageError
from vllm_choreo.plan import CallPlan
from vllm_choreo.provenance import Trace


class BlockPool(Protocol):
    """What the store needs of vLLM's block pool."""

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...


@dataclass(eq=False)
class Message:
    """One message of a session, or a copy of one.

    Attributes:
        id: of a copy, that of the message whose tokens it has; it cannot be named itself.
        trace: what its keys and values carry traces of.
        adapter: vLLM's LoRA request that encodes it, or None.
        token_ids: header and generated tokens; None while they are being generated.
        parents: the messages behind `plan.parents`, in the same order; they keep a freed parent's
            recipe alive for as long as a message may have to be encoded again.
        plan: how it is encoded; None until all its parents' lengths are known.
        blocks: KV blocks that hold tokens `0 … num_encoded-1`, from its first slot on.
        stored_position: position to which the first key is rotated now.
        held_in_step: the step in which its blocks last changed.
        num_readers: running calls that read it; its blocks must stay.
        num_waiting: calls that wait for it or will read it.
        encoder: id of the request that is making or encoding it; None when nobody is.
        recipe: what makes its encoding the same as another's; None where none can be.
        failure: why it will never be complete.
        freed: its session gave it up: no new call may name it.
        copied: for a copy that exact calls read, the message whose tokens it has.
        num_unreported: tokens of a copy that were encoded, but that no call has reported yet.
    """

    id: str
    session: str
    trace: Trace
    adapter: Any = None
    token_ids: list[int] | None = None
    parents: tuple[Message, ...] = ()
    plan: CallPlan | None = None
    blocks: list[Any] = field(default_factory=list)
    num_encoded: int = 0
    stored_position: int = 0
    held_in_step: int = -1
    num_readers: int = 0
    num_waiting: int = 0
    encoder: str | None = None
    recipe: Hashable = None
    failure: str | None = None
    freed: bool = False
    copied: Message | None = None
    num_unreported: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.token_ids is not None else 0

    @property
    def is_known(self) -> bool:
        """Its tokens are final."""
        return self.token_ids is not None

    @property
    def is_resident(self) -> bool:
        """Every token has keys and values, at the latest when the step now planned has run."""
        return self.token_ids is not None and self.num_encoded == len(self.token_ids)

    @property
    def in_use(self) -> bool:
        return self.num_readers > 0 or self.num_waiting > 0 or self.encoder is not None


class MessageStore:
    """All messages of an engine, and the order in which their blocks may be evicted."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.messages: dict[tuple[str, str], Message] = {}
        # Messages that hold blocks, least recently used first.
        self._holding: OrderedDict[Message, None] = OrderedDict()
        self.by_recipe: dict[Hashable, Message] = {}
        self.copies: dict[Hashable, Message] = {}
        self.num_evictions = 0
        self.step = 0  # the one being planned

    def create(self, session: str, message_id: str, adapter: Any = None) -> Message:
        """A new message that has no tokens yet.

        Raises:
            NameTakenError: the session has a message of that id.
        """
        existing = self.messages.get((session, message_id))
        if existing is not None and not existing.failure:
            raise NameTakenError(
                "this session has a message of that name; choose another, or free it first",
                parameter="save_as",
                value=message_id,
            )
        message = Message(message_id, session, Trace(message_id), adapter)
        self.messages[session, message_id] = message
        return message

    def copy(
        self,
        message: Message,
        start: int,
        stop: int,
        adapter: Any,
        parents: tuple[Message, ...],
        plan: CallPlan,
    ) -> Message:
        """Tokens `start … stop-1` of `message` in another context: the copy, made if there is none.

        A new one is known and not resident, as if it had been evicted.
        """
        key = (message, start, stop, adapter.lora_int_id if adapter else 0, parents, plan)
        if key in self.copies:
            return self.copies[key]
        assert message.token_ids is not None
        trace = Trace(message.id, tuple(p.trace for p in parents), message.trace.origin)
        copy = Message(message.id, message.session, trace, adapter, copied=message, plan=plan)
        copy.token_ids, copy.parents = message.token_ids[start:stop], parents
        copy.num_unreported = copy.num_tokens
        copy.freed = any(source.freed for source in (message, *parents))
        if not copy.freed:
            self.copies[key] = copy
        return copy

    def copies_of(self, messages: Collection[Message]) -> set[Message]:
        """The copies of `messages`, and all that were encoded with these or those."""
        found = set(messages)
        for copy in self.copies.values():  # in order: a copy comes after the copies that it reads
            if copy.copied in found or not found.isdisjoint(copy.parents):
                found.add(copy)
        return found.difference(messages)

    def get(self, session: str, message_id: str) -> Message:
        """The message that a call of `session` names.

        Raises:
            UnknownMessageError: there is none; a message of another session looks the same.
        """
        message = self.messages.get((session, message_id))
        if message is None:
            raise UnknownMessageError(
                "there is no such message in this session (never made, or freed)",
                parameter="parents",
                value=message_id,
            )
        return message

    def hold(self, message: Message, blocks: Sequence[Any], num_encoded: int) -> None:
        """Make `blocks` the place of tokens `0 … num_encoded-1`, and let go of the old ones."""
        assert message.plan is not None, "a message is encoded according to its plan"
        held = list(blocks[: -(-num_encoded // self.block_size)])
        position = message.stored_position if message.blocks else message.plan.base
        self.pool.touch(held)
        self._drop_blocks(message)
        message.blocks, message.num_encoded = held, num_encoded
        message.stored_position, message.held_in_step = position, self.step
        self.use(message)

    def share(self, message: Message, denied: Collection[str] = ()) -> None:
        """Start from the full blocks of a message of the same recipe, if one holds any.

        The last block stays private: at least one token must run, for vLLM to run the request.
        Traces of `denied` messages are not shared: what was reused would tell their tokens.
        """
        assert message.plan is not None
        recipe = _recipe(message)
        twin = self.by_recipe.get(recipe)
        if twin and twin.trace.carries(denied):
            twin = None
        if twin and twin is not message and twin.stored_position == message.plan.base:
            num_shared = min(twin.num_encoded, message.num_tokens - 1)
            num_shared -= num_shared % self.block_size
            self.hold(message, twin.blocks, num_shared)
        message.recipe = recipe
        self.by_recipe[recipe] = message

    def is_settled(self, message: Message) -> bool:
        """Whether all its keys were written before the step that is being planned."""
        return message.is_resident and message.held_in_step < self.step

    def use(self, message: Message) -> None:
        """Mark as most recently used."""
        if message.blocks:
            self._holding[message] = None
            self._holding.move_to_end(message)

    def evict(self, message: Message) -> None:
        """Give the blocks back; the recipe stays."""
        if message.blocks:
            self.num_evictions += 1
        self._drop_blocks(message)

    def evict_one(self, protected: Sequence[Collection[Message]], waiting_too: bool) -> bool:
        """Evict a message that no running call reads: an idle one, least recently used first.

        Args:
            protected: never the messages of the first set; those of the later sets only with
                `waiting_too`, the last set first.
            waiting_too: where no message is idle, take one for which a call waits. It will be
                encoded again; without this, calls that wait could block one another for ever.

        Returns:
            Whether there was one.
        """
        candidates = [m for m in self._holding if not m.num_readers]
        spared = set().union(*protected)
        victim = next((m for m in candidates if not m.in_use and m not in spared), None)
        if victim is None and waiting_too:
            victim = self._least_protected(candidates, protected)
        if victim is None:
            return False
        self.evict(victim)
        return True

    def _least_protected(
        self, candidates: Sequence[Message], protected: Sequence[Collection[Message]]
    ) -> Message | None:
        for num_sets in range(len(protected), 0, -1):
            spared = set().union(*protected[:num_sets])
            for message in reversed(candidates):
                if message not in spared:
                    return message
        return None if protected or not candidates else candidates[-1]

    def free(self, message: Message) -> None:
        """The session gives the message up: unknown to new calls, gone when the last one ends."""
        message.freed = True
        if self.messages.get((message.session, message.id)) is message:
            del self.messages[message.session, message.id]
        self.settle(message)
        # No call can list the message any more, and so none can need these.
        orphans = self.copies_of([message])
        if orphans:
            self.copies = {key: copy for key, copy in self.copies.items() if copy not in orphans}
        for copy in orphans:
            copy.freed = True
            self.settle(copy)

    def settle(self, message: Message) -> None:
        """Give back the blocks of a freed or failed message once nobody needs them."""
        if not (message.freed or message.failure):
            return
        if self.by_recipe.get(message.recipe) is message:
            del self.by_recipe[message.recipe]
        if not message.in_use:
            self._drop_blocks(message)

    def holding(self) -> list[Message]:
        """Messages that hold blocks, least recently used first."""
        return list(self._holding)

    def of_session(self, session: str) -> list[Message]:
        return [m for (owner, _), m in self.messages.items() if owner == session]

    def _drop_blocks(self, message: Message) -> None:
        # Reversed, as vLLM frees: the tail of a message is reused first.
        self.pool.free_blocks(reversed(message.blocks))
        message.blocks, message.num_encoded, message.stored_position = [], 0, 0
        self._holding.pop(message, None)

    def stats(self, session: str | None = None) -> dict[str, Any]:
        """Messages, blocks and sharing, for `c.stats()` and `vllm-choreo inspect`."""
        everything = [*self.messages.values(), *self.copies.values()]
        chosen = [m for m in everything if session in (None, m.session)]
        blocks = {block.block_id for m in self._holding for block in m.blocks}
        return {
            "num_messages": len(chosen),
            "num_copies": sum(m.copied is not None for m in chosen),
            "num_resident": sum(m.is_resident for m in chosen),
            "num_blocks": len({b.block_id for m in chosen for b in m.blocks}),
            "num_blocks_all_sessions": len(blocks),
            "num_evictions": self.num_evictions,
            "block_size": self.block_size,
            "messages": [self._describe(m) for m in chosen],
        }

    def _describe(self, message: Message) -> dict[str, Any]:
        size = self.block_size
        return {
            "id": message.id,
            "is_copy": message.copied is not None,
            "num_tokens": message.num_tokens,
            "num_encoded": message.num_encoded,
            "stored_position": message.stored_position,
            "parents": [parent.id for parent in message.parents],
            "num_readers": message.num_readers,
            "num_waiting": message.num_waiting,
            "failure": message.failure,
            "blocks": [
                {
                    "block_id": block.block_id,
                    "ref_cnt": block.ref_cnt,
                    "num_valid_slots": min(size, message.num_encoded - i * size),
                    "position": message.stored_position + i * size,
                }
                for i, block in enumerate(message.blocks)
            ],
        }


def _recipe(message: Message) -> Hashable:
    """Equal for messages of one session whose encodings are the same."""
    plan = message.plan
    assert plan is not None and message.token_ids is not None
    adapter = message.adapter.lora_int_id if message.adapter else 0
    spans = tuple((span.start, span.stop, span.offset) for span in plan.parents)
    # Messages count by identity: a name may be given again after it was freed.
    parents = message.parents
    tokens = tuple(message.token_ids)
    return message.session, adapter, tokens, parents, spans, plan.new_offset
