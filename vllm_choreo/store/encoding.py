# SPDX-License-Identifier: Apache-2.0
"""Messages as the engine knows them, and their encodings. Imports neither torch nor vllm.

A message is a name in a session; an encoding is its keys and values, as computed in one context by
one model. A message has the encoding that its call made, and others of the same tokens:

    message  --own-->     encoding   in the context of its call
             --copies-->  encodings  in other contexts, by what they are encoded with

A copy encodes all its tokens in the other context, or is a *patch* of another encoding: runs of
tokens are encoded anew, all others are read as they are, in the very blocks if no run touches them.

An encoding has a *recipe* (tokens, parents, plan, adapter), which is the truth; its KV blocks are a
cache of it:

    generating --finish--> known, not resident --encode--> resident --evict--> known, not resident
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.runs import TokenRange, TokenRanges, num_tokens
from vllm_choreo.semantics.other_model import AdapterRequest
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.block_copies import Block
from vllm_choreo.store.groups import BlockIndices, has_all
from vllm_choreo.store.pictures import Picture

CopyKey = tuple[bytes, tuple["Encoding", ...]]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, or another model; two are equal if their weights are, whatever their names.

    Attributes:
        weights: digest of the weights.
        request: vLLM's LoRA request that loads them, or an `OtherModel`.
    """

    weights: bytes
    request: AdapterRequest = field(compare=False)


@dataclass(eq=False)
class StoredMessage:
    """One message of a session.

    Attributes:
        tenant: the tenant within which its own encoding is shared.
        reader: the tenant within which its copies are shared; empty: `tenant`.
        request: id of the engine's request that makes it; empty if it was loaded.
        own: its encoding by the call that made it.
        copies: its other encodings, by `Encoding.copy_key`.
        open_report: the report of its call, while the client has not told yet how many of the
            tokens it keeps; None otherwise.
        pinned_until: time until which `own` is evicted last, on the clock of the store.
        failure: the reason why it will never be complete, or None.
        freed: whether its session gave it up: no new call may name it.
    """

    id: str
    session: str
    tenant: str = ""
    reader: str = ""
    request: str = ""
    open_report: dict[str, Any] | None = None
    pinned_until: float = 0.0
    failure: str | None = None
    freed: bool = False
    own: Encoding = field(init=False, repr=False)
    copies: dict[CopyKey, Encoding] = field(default_factory=dict, repr=False)

    @property
    def encodings(self) -> list[Encoding]:
        """All encodings of the message, its own first."""
        return [self.own, *self.copies.values()]


@dataclass(frozen=True)
class Patch:
    """Difference between an encoding and another one of the same tokens.

    Attributes:
        source: the other one; the patch has its own place in the same frame of positions.
        start: the first token that is seen in the patch's context.
        runs: tokens that are encoded anew there.
        layers: the layers in which they are, each range beginning with the hidden states that the
            source's encoding had at its first layer; all others are the source's. None: all.
    """

    source: Encoding
    start: int
    runs: TokenRanges
    layers: LayerRanges | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are encoded anew."""
        return num_tokens(self.runs)

    @property
    def num_charged(self) -> int:
        """Number of tokens that cost as much if encoded in all layers."""
        return self.layers.charged(self.num_tokens) if self.layers else self.num_tokens

    @property
    def is_entering(self) -> bool:
        """True if a range of its layers begins with hidden states of the source."""
        return self.layers is not None and bool(self.layers.entries)


@dataclass(eq=False)
class Encoding:
    """Tokens of a message with their keys and values, in one context and by one model.

    Blocks and counts are written by `Residency` alone.

    Attributes:
        trace: history of the messages that its keys and values carry traces of.
        adapter: the adapter that encodes it, or None.
        token_ids: header and generated tokens, or some of them; None while they are generated.
        pictures: pictures among these tokens, in their order.
        parents: the encodings behind `plan.parents`, in the same order; they keep a freed parent's
            recipe alive for as long as this one may have to be encoded again.
        plan: how it is encoded; None until all its parents' lengths are known. That of a patch
            places token 0, seen or not, so that `base` may be negative.
        patch: None: all tokens are encoded in its context.
        hidden_layers: layers whose hidden states the workers hold, see `HiddenStateIndex`.
        is_entered: whether a patch was made of it that begins with its hidden states.
        nonce: random bytes if its keys and values were loaded and nobody trusted has saved them;
            empty if this engine has made them, or somebody trusted.
        digest: digest of all that it depends on; None until all of that is known.
        is_untrusted: whether it has a nonce, or depends on one that has; known when its digest is.
        is_orphan: whether it is a copy that no new call can read.
        num_unreported: tokens of a copy that were encoded, but that no call has reported yet.
        readers: copies that were encoded with it.
        blocks: for each KV cache group, the blocks that hold tokens `0 … num_encoded-1`, from its
            first slot on, or null blocks (`CacheGroups`); empty: it holds none.
        num_blocks: blocks that it holds, of all groups together.
        is_kept_whole: whether it keeps what a reader right behind it does not see, until there is
            too little room: somebody has asked for that.
        stored_position: position to which the first key is rotated now.
        unwritten: runs of a patch whose step has not been planned yet.
        state: state of layers without keys behind its last token, for whoever begins there; None in
            models that have none, and where it was given up.
        state_step: the step in which that was written, at the latest.
        held_in_step: the step in which its blocks last changed.
        num_readers: running calls that read it; its blocks must stay.
        num_waiting: calls that wait for it or will read it.
        num_wanting: patches of it that calls wait for and that have no place yet.
        num_entering: those of them that begin with its hidden states.
        encoders: ids of the requests that make or encode it: one, or one for each run of a patch.
    """

    message: StoredMessage
    trace: Trace
    adapter: Adapter | None = None
    token_ids: list[int] | None = None
    parents: tuple[Encoding, ...] = field(default=(), repr=False)
    plan: CallPlan | None = None
    patch: Patch | None = None
    hidden_layers: tuple[int, ...] = ()
    is_entered: bool = False
    nonce: bytes = b""
    digest: bytes | None = None
    is_untrusted: bool = False
    pictures: tuple[Picture, ...] = field(default=(), repr=False)
    is_orphan: bool = False
    num_unreported: int = 0
    readers: set[Encoding] = field(default_factory=set, repr=False)
    blocks: tuple[list[Block], ...] = ()
    num_blocks: int = 0
    is_kept_whole: bool = False
    num_encoded: int = 0
    stored_position: int = 0
    unwritten: list[TokenRange] = field(default_factory=list)
    state: Block | None = None
    state_step: int = -1
    held_in_step: int = -1
    num_readers: int = 0
    num_waiting: int = 0
    num_wanting: int = 0
    num_entering: int = 0
    encoders: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.patch and self.patch.is_entering:
            self.patch.source.is_entered = True

    @property
    def tenant(self) -> str:
        """Tenant that it belongs to: an equal encoding of another tenant is another encoding."""
        return (self.is_copy and self.message.reader) or self.message.tenant

    @property
    def is_copy(self) -> bool:
        """True if it is not the encoding that its message was made with."""
        return self is not self.message.own

    @property
    def copy_key(self) -> CopyKey:
        """Key of a copy among those of its message: its digest, and the encodings it reads.

        Behind another message of the same tokens it is another copy: that one goes with the other
        message, carries traces of it, and continues another chain.
        """
        assert self.digest is not None
        return self.digest, self.parents

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.token_ids is not None else 0

    @property
    def has_rows(self) -> bool:
        """True if it has pictures whose tokens have other positions than text would have."""
        return any(picture.num_positions is not None for picture in self.pictures)

    def num_positions(self, start: int, stop: int) -> int:
        """Positions that tokens `start … stop-1` take, which cut no picture."""
        saved = (
            picture.num_tokens - picture.num_positions
            for picture in self.pictures
            if picture.num_positions is not None and start <= picture.start < stop
        )
        return stop - start - sum(saved)

    @property
    def is_known(self) -> bool:
        """True if its tokens are final."""
        return self.token_ids is not None and self.message.open_report is None

    @property
    def is_resident(self) -> bool:
        """True if every token has keys and values, at the latest after the step now planned.

        In groups with windows some of them may have been given up, see `has`.
        """
        return self.is_known and self.num_encoded == self.num_tokens and not self.unwritten

    def has(self, wanted: BlockIndices | None) -> bool:
        """Return whether it is resident, with certain blocks of each group; None: any."""
        return self.is_resident and (wanted is None or has_all(self.blocks, wanted))

    @property
    def held_blocks(self) -> list[Block]:
        """Blocks that it holds, group by group."""
        return [block for of_group in self.blocks for block in of_group if not block.is_null]

    @property
    def recipe(self) -> tuple[Encoding, ...]:
        """Encodings that must be resident for it to be encoded."""
        return (*self.parents, self.patch.source) if self.patch else self.parents

    @property
    def wants_source(self) -> bool:
        """True if it is a patch that a call waits for, still to be laid over its source."""
        return self.patch is not None and self.num_waiting > 0 and not self.blocks

    @property
    def in_use(self) -> bool:
        """True if a call reads it, waits for it or for a patch of it, or encodes it."""
        counts = self.num_readers, self.num_waiting, self.num_wanting
        return any(counts) or bool(self.encoders)

    @property
    def is_awaited(self) -> bool:
        """True if a call waits for it or for a patch of it, or a run of it is to be written."""
        return bool(self.num_waiting or self.num_wanting or self.unwritten)

    @property
    def is_given_up(self) -> bool:
        """True if no new call will read it."""
        return self.is_orphan or self.message.freed or self.message.failure is not None

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that evicting it would give back."""
        return 0 if self.in_use else self.num_blocks

    def is_pinned(self, now: float) -> bool:
        """Return whether it is pinned at the time `now`, and evicted after all that are not."""
        return self.message.pinned_until > now and not self.is_copy


def copies_of(messages: Iterable[StoredMessage]) -> set[Encoding]:
    """Copies of `messages`, and all copies that were encoded with these or with them."""
    found: set[Encoding] = set()
    frontier = [encoding for message in messages for encoding in message.encodings]
    while frontier:
        encoding = frontier.pop()
        if encoding.is_copy:
            if encoding in found:
                continue
            found.add(encoding)
        frontier += encoding.readers
    return found
