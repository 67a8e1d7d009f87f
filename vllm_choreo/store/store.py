# SPDX-License-Identifier: Apache-2.0
"""Messages and where their keys and values lie. Imports neither torch nor vllm.

A message's *recipe* (tokens, parents, offsets) is the truth; its KV blocks are a cache of it:

    generating --finish--> known, not resident --encode--> resident --evict--> known, not resident

The store holds one reference on every block of a resident message; calls that read it hold
their own, so a block returns to the pool when the last of them lets go.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_choreo.errors import LimitError, NameTakenError, UnknownMessageError
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.digest import recipe_digest
from vllm_choreo.store.eviction import choose_victim, over_share


class BlockPool(Protocol):
    """What the store needs of vLLM's block pool."""

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...


class HostTier(Protocol):
    """Memory outside the KV cache in which evicted messages are kept."""

    def save(self, message: Message) -> None:
        """Copy its blocks out, if there is room."""

    def load(self, message: Message, blocks: Sequence[Any]) -> tuple[int, int]:
        """Copy a saved message into `blocks`; returns its stored position and its tokens."""

    def discard(self, message: Message) -> None:
        """Forget a message."""


@dataclass(eq=False)
class Message:
    """One message of a session, or a copy of one.

    Attributes:
        id: of a copy, that of the message whose tokens it has; it cannot be named itself.
        trace: what its keys and values carry traces of.
        tenant: to whom the session belongs.
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
        recipe: digest of what its encoding depends on; None until all of that is known.
        open_report: what its call reported, while the client has not told yet how many of the
            tokens it keeps; None otherwise.
        pinned_until: until then it is evicted last; on the clock of the store.
        failure: why it will never be complete.
        freed: its session gave it up: no new call may name it.
        copied: for a copy that exact calls read, the message whose tokens it has.
        num_unreported: tokens of a copy that were encoded, but that no call has reported yet.
    """

    id: str
    session: str
    trace: Trace
    tenant: str = ""
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
    recipe: bytes | None = None
    open_report: dict[str, Any] | None = None
    pinned_until: float = 0.0
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
        return self.token_ids is not None and self.open_report is None

    @property
    def is_resident(self) -> bool:
        """Every token has keys and values, at the latest when the step now planned has run."""
        return self.is_known and self.num_encoded == self.num_tokens

    @property
    def in_use(self) -> bool:
        return self.num_readers > 0 or self.num_waiting > 0 or self.encoder is not None


class MessageStore:
    """All messages of an engine, and the order in which their blocks may be evicted."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        engine: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.engine = engine
        self.clock = clock
        self.tier: HostTier | None = None
        self.messages: dict[tuple[str, str], Message] = {}
        # Messages that hold blocks, least recently used first.
        self._holding: OrderedDict[Message, None] = OrderedDict()
        self.by_recipe: dict[bytes, Message] = {}
        self.copies: dict[Hashable, Message] = {}
        self.totals: Counter[str] = Counter()  # of messages and tokens since the engine started
        self.step = 0  # the one being planned

    def create(
        self, session: str, message_id: str, adapter: Any = None, tenant: str = ""
    ) -> Message:
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
        message = Message(message_id, session, Trace(message_id), tenant, adapter)
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
        copy = Message(message.id, message.session, trace, message.tenant, adapter, copied=message)
        copy.token_ids, copy.parents, copy.plan = message.token_ids[start:stop], parents, plan
        self.identify(copy)
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

    def identify(self, message: Message) -> None:
        """Give a message its recipe, once its tokens and its plan are known."""
        assert message.plan is not None and message.token_ids is not None
        parents = [parent.recipe for parent in message.parents]
        assert None not in parents, "parents are known before their children are"
        message.recipe = recipe_digest(
            self.engine,
            message.tenant,
            message.adapter,
            message.token_ids,
            message.plan,
            [parent for parent in parents if parent],
        )

    def share(self, message: Message, denied: Collection[str] = ()) -> None:
        """Start from the full blocks of a message of the same recipe, if one holds any.

        The last block stays private: at least one token must run, for vLLM to run the request.
        Traces of `denied` messages are not shared: what was reused would tell their tokens.
        """
        assert message.plan is not None and message.recipe is not None
        twin = self.by_recipe.get(message.recipe)
        if twin and denied and (twin.session != message.session or twin.trace.carries(denied)):
            twin = None
        if twin and twin is not message and twin.stored_position == message.plan.base:
            num_shared = min(twin.num_encoded, message.num_tokens - 1)
            num_shared -= num_shared % self.block_size
            self.hold(message, twin.blocks, num_shared)
        self.by_recipe[message.recipe] = message

    def end(self, message: Message, num_tokens: int) -> dict[str, Any] | None:
        """Complete a message of which the client keeps the first `num_tokens` tokens.

        Returns:
            What its call reported, of these tokens; None if it was complete before.
        """
        report, message.open_report = message.open_report, None
        if report is None or message.token_ids is None:
            return None
        num_dropped = message.num_tokens - num_tokens
        del message.token_ids[num_tokens:]
        if message.num_encoded > num_tokens:
            message.num_encoded = num_tokens
            num_blocks = -(-num_tokens // self.block_size)
            self.pool.free_blocks(reversed(message.blocks[num_blocks:]))
            del message.blocks[num_blocks:]
        self.known(message)
        return {
            **report,
            "num_tokens": num_tokens,
            "encoded_tokens": report["encoded_tokens"] - num_dropped,
        }

    def known(self, message: Message) -> None:
        """The tokens of a generated message are final: others may share them from now on."""
        self.identify(message)
        assert message.recipe is not None
        self.by_recipe[message.recipe] = message

    def is_settled(self, message: Message) -> bool:
        """Whether all its keys were written before the step that is being planned."""
        return message.is_resident and message.held_in_step < self.step

    def use(self, message: Message) -> None:
        """Mark as most recently used."""
        if message.blocks:
            self._holding[message] = None
            self._holding.move_to_end(message)

    def evict(self, message: Message) -> None:
        """Give the blocks back; the recipe stays, and a copy in host memory if there is room."""
        if message.blocks:
            self.totals["evicted_messages"] += 1
            self.totals["evicted_tokens"] += message.num_encoded
            if self.tier and self.is_settled(message):
                self.tier.save(message)
        self._drop_blocks(message)

    def evict_one(self, protected: Sequence[Collection[Message]], waiting_too: bool) -> bool:
        """Evict the message that `choose_victim` chooses; returns whether there was one."""
        victim = choose_victim(self._holding, protected, waiting_too, self.clock())
        if victim is None:
            return False
        self.evict(victim)
        return True

    def keep_to_share(self, max_blocks: int) -> None:
        """Evict idle messages of tenants whose messages hold more than `max_blocks` blocks."""
        for message in over_share(self._holding, max_blocks, self.clock()):
            self.evict(message)

    def pin(self, messages: Collection[Message], ttl: float, max_blocks: int) -> None:
        """Evict `messages` last, for `ttl` seconds.

        Raises:
            LimitError: with these, pinned messages would take more than `max_blocks` blocks.
        """
        num_blocks = sum(
            -(-message.num_tokens // self.block_size) for message in {*self.pinned(), *messages}
        )
        if num_blocks > max_blocks:
            raise LimitError(
                f"pinned messages may take {max_blocks} blocks of the KV cache "
                "(additional_config.choreo.pinned_share); unpin some, or let pins expire",
                parameter="messages",
                value=f"{num_blocks} blocks",
            )
        for message in messages:
            message.pinned_until = self.clock() + ttl

    def pinned(self) -> list[Message]:
        now = self.clock()
        return [message for message in self.messages.values() if message.pinned_until > now]

    def restore(self, message: Message, blocks: Sequence[Any]) -> None:
        """Bring a message back from host memory into `blocks`, before the step being planned."""
        assert self.tier is not None and message.plan is not None
        position, num_encoded = self.tier.load(message, blocks)
        self.hold(message, blocks, num_encoded)
        message.stored_position = position
        self.totals["restored_messages"] += 1
        self.totals["restored_tokens"] += num_encoded

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
        if message.recipe and self.by_recipe.get(message.recipe) is message:
            del self.by_recipe[message.recipe]
        if not message.in_use:
            self._drop_blocks(message)
            if self.tier:
                self.tier.discard(message)

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
