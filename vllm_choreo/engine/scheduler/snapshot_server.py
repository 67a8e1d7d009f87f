# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part in saving and loading messages, between steps.

Files are the facade's (`snapshot/`), bytes the workers' (`engine/worker/block_bytes.py`). Here
blocks are held while they are read, and found for what is loaded; a loaded message has its name
when all is there.

    save    describe -> hold -> (workers read) -> release
    load    begin -> allocate -> (workers write) -> ... -> commit, or abort
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.lora import check_loadable
from vllm_choreo.engine.scheduler.adapters import Adapters
from vllm_choreo.engine.scheduler.composing import check_loaded
from vllm_choreo.engine.scheduler.pictures import PictureRules, saved_picture
from vllm_choreo.errors import AdapterError, ChoreoError
from vllm_choreo.semantics.other_model import OTHER_MODEL, OtherModel
from vllm_choreo.semantics.positions import check_length
from vllm_choreo.store.block_copies import Block
from vllm_choreo.store.encoding import Adapter, Encoding
from vllm_choreo.store.groups import Blocks
from vllm_choreo.store.pictures import Picture
from vllm_choreo.store.recipes import Rebuilt, pictures_of, recipes_of
from vllm_choreo.store.store import MessageStore

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig


class SnapshotServer:
    """Blocks and recipes of messages that are being saved or loaded, by ticket.

    Args:
        max_model_len: tokens of the longest message that could be encoded again.
        lora_config: the engine's options of adapters; None: it takes none.
        picture_rules: rules for pictures that are loaded.
        may_write: returns whether free blocks may be written between two steps: no KV connector
            still reads them.
        can_turn_keys: whether keys may be rotated where they lie, as a patch of them may need.
    """

    def __init__(
        self,
        store: MessageStore,
        pool: BlockPool,
        adapters: Adapters,
        max_model_len: int,
        lora_config: LoRAConfig | None,
        picture_rules: PictureRules,
        may_write: Callable[[], bool] = lambda: True,
        can_turn_keys: bool = True,
    ) -> None:
        self._store = store
        self._may_write = may_write
        self._pool = pool
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._lora_config = lora_config
        self._picture_rules = picture_rules
        self._can_turn_keys = can_turn_keys
        self._tickets = itertools.count()
        # Each with the layers of which it had hidden states: who saves it counts on them.
        self._described: dict[int, list[tuple[Encoding, tuple[int, ...]]]] = {}
        self._pictures: dict[int, list[Picture]] = {}
        self._held: dict[int, Encoding] = {}
        self._loads: dict[int, Rebuilt] = {}
        # States that nobody gives up meanwhile, by ticket, or by the encoding that is loaded.
        self._kept_states: dict[int | Encoding, Block] = {}

    @property
    def is_holding(self) -> bool:
        """True while blocks are held for a save or a load."""
        return bool(self._held) or any(
            encoding.num_readers
            for rebuilt in self._loads.values()
            for encoding in rebuilt.encodings
        )

    # -- saving ------------------------------------------------------------------------------

    def describe(self, session: str, message_ids: Sequence[str]) -> dict[str, Any]:
        """Describe messages by their recipes, with a ticket for `hold`, until `release_ticket`.

        Returns:
            `recipes`: see `store/recipes.py`; `own`: the encodings of the messages, in their order;
            `firsts`: of each encoding, the first token that it keeps in each KV cache group;
            `resident`: those of all encodings that can be held now; `ticket`.

        Raises:
            UnknownMessageError: there is no such message.
        """
        messages = [self._store.get(session, m, "messages") for m in message_ids]
        encodings, recipes = recipes_of(messages)
        ticket, groups = next(self._tickets), self._store.groups
        self._described[ticket] = [(encoding, encoding.hidden_layers) for encoding in encodings]
        if pictures := pictures_of(encodings):
            self._pictures[ticket] = pictures
        return {
            "ticket": ticket,
            "recipes": recipes,
            "own": [encodings.index(message.own) for message in messages],
            "firsts": [groups.kept_tokens(encoding.num_tokens) for encoding in encodings],
            "resident": [n for n, encoding in enumerate(encodings) if encoding.is_resident],
        }

    def release_ticket(self, ticket: int) -> None:
        """Forget a ticket of `describe`."""
        self._described.pop(ticket, None)
        self._pictures.pop(ticket, None)

    def picture(self, ticket: int, number: int) -> bytes:
        """Bytes of a picture of what `describe` tells, see `engine/picture_files.py`.

        Raises:
            UnsupportedOptionError: files do not hold such a one.
        """
        return saved_picture(self._pictures[ticket][number])

    def hold(self, ticket: int, number: int) -> dict[str, Any] | None:
        """Keep the blocks of an encoding where they are until `release`.

        Returns:
            `ticket`, `blocks`: their ids, by KV cache group, and -1 in gaps, `stored_position`,
            `hidden`: the key of the hidden states, or None, and `state`: the number of its state,
            or None, if the model has none. None: the encoding, or hidden states of it, or its
            state, are not there any more.
        """
        encoding, layers = self._described[ticket][number]
        hidden, states = self._hidden_key(encoding), self._store.states
        is_there = encoding.has(self._store.groups.held(encoding.num_tokens))
        is_there &= states is None or encoding.state is not None
        if not is_there or (layers and hidden is None):
            return None
        self._store.residency.wait_for([encoding])
        self._store.residency.read([encoding])
        held = next(self._tickets)
        self._held[held] = encoding
        return {
            "ticket": held,
            "blocks": _ids(encoding.blocks),
            "stored_position": encoding.stored_position,
            "hidden": hidden,
            "state": self._keep_state(held, encoding),
        }

    def release(self, ticket: int) -> bool:
        """End what `hold` began; returns whether the blocks stayed where they were until now."""
        encoding = self._held.pop(ticket, None)
        if encoding is None:
            return False
        self._store.residency.leave([encoding], reading=True)
        self._let_state_go(ticket)
        self._store.settle(encoding)
        return True

    def revoke(self) -> bool:
        """Release all blocks held for saves, as calls need them; returns whether there were any."""
        tickets = list(self._held)
        for ticket in tickets:
            self.release(ticket)
        return bool(tickets)

    # -- loading -----------------------------------------------------------------------------

    def begin(
        self, session: str, tenant: str, recipes: Mapping[str, Any], named: Mapping[str, int]
    ) -> int:
        """Rebuild messages (see `Rebuilt`); returns a ticket for the other operations.

        Raises:
            TooLongError, OffsetError, ChainError: a message could not be encoded again here.
            AdapterError: there is only a recipe, and its adapter is not here.
            ChoreoError: hidden states or pictures for which there is no room, or layers that cannot
                be run.
        """
        pictures = self._picture_rules.loaded(recipes.get("pictures", ()), tenant)
        rebuilt = Rebuilt(recipes, named, self._store, session, tenant, self._adapter, pictures)
        for encoding, entry in zip(rebuilt.encodings, recipes["encodings"], strict=True):
            assert encoding.plan is not None
            check_length(encoding.plan, encoding.num_tokens, self._max_model_len)
            if self._store.states is not None:
                check_loaded(self._store.states, encoding)
            is_lost = encoding.adapter and not self._adapters.is_current(encoding.adapter)
            if is_lost and not entry["data"] and not encoding.message.freed:
                raise AdapterError(
                    "the message was saved without its keys and values, and the adapter or model "
                    "that encoded it is not here: put the adapter's folder where it was, load "
                    "where it is, or have messages encoded by this model (on_mismatch='encode')",
                    parameter="adapter",
                    value=encoding.adapter and encoding.adapter.request.lora_name,
                )
        self._reserve(rebuilt, recipes["encodings"])
        ticket = next(self._tickets)
        self._loads[ticket] = rebuilt
        return ticket

    def allocate(self, ticket: int, number: int, stored_position: int) -> dict[str, Any] | None:
        """Find blocks for an encoding: free ones, then host memory, then those of idle messages.

        Returns:
            `blocks`: of each KV cache group, and -1 in gaps, `firsts`: the first token of each that
            is to be there, and `in_host`, whether the blocks are of host memory; without blocks:
            another message has the same keys and values, and its blocks are shared; `hidden`: the
            key of the hidden states, or None; `state`: the number of a state, or None, if the model
            has none, or another message's is shared. None: there is no room, or none that may be
            written now, and the message will be encoded when it is read.
        """
        encoding = self._loads[ticket].encodings[number]
        place = self._allocate(encoding, stored_position)
        if place is None:
            return None
        firsts = self._store.groups.kept_tokens(encoding.num_tokens)
        state = self._kept_states.get(encoding)
        return {
            **place,
            "firsts": firsts,
            "hidden": self._hidden_key(encoding),
            "state": state and state.block_id,
        }

    def _allocate(self, encoding: Encoding, stored_position: int) -> dict[str, Any] | None:
        if encoding.is_given_up:
            return None  # no call will read it
        is_known = 0 <= stored_position <= self._max_model_len - encoding.num_tokens
        if not (is_known or self._can_turn_keys):
            return None  # the model cannot be given such positions, of which it would be patched
        if self._share(encoding):
            return {"blocks": [], "in_host": False}
        if not self._has_room_for_state():
            return None
        held = self._store.groups.held(encoding.num_tokens)
        need = sum(map(len, held))
        # Of a message with a state, all is where calls can begin behind it.
        tier = self._store.tier if self._store.states is None else None
        is_full = self._pool.get_num_free_blocks() < need or not self._may_write()
        if is_full and tier is not None:
            position, count = stored_position, encoding.num_tokens
            if copy := tier.reserve(encoding, held, count, position):
                ids = [[-1 if n is None else n for n in of_group] for of_group in copy.blocks]
                return {"blocks": ids, "in_host": True}
        if not self._may_write():
            return None
        while self._pool.get_num_free_blocks() < need:
            # The blocks are written at once, and copying out would come with the next step.
            if not self._store.evict_one([], waiting_too=False, into_host=False):
                return None
        blocks = self._pool.get_new_blocks(need)
        table, rest = list[list[Block]](), list[Block](blocks)
        for chosen in held:
            table.append([self._pool.null_block] * chosen.start + rest[: len(chosen)])
            del rest[: len(chosen)]
        self._hold(encoding, table, stored_position)
        self._pool.free_blocks(blocks)  # the store holds its own references
        self._give_state(encoding)
        return {"blocks": _ids(table), "in_host": False}

    def deallocate(self, ticket: int, number: int) -> None:
        """Drop an encoding whose bytes were wrong: it will be encoded when it is read."""
        self._drop(self._loads[ticket].encodings[number])

    def commit(self, ticket: int) -> dict[str, int]:
        """Let calls name the messages from now on.

        Returns:
            `messages` and `tokens` that came with their keys and values.

        Raises:
            NameTakenError: one of the names is taken; then none is entered.
        """
        rebuilt, tier = self._loads[ticket], self._store.tier
        rebuilt.register()
        del self._loads[ticket]
        placed = [e for e in rebuilt.encodings if e.num_readers or (tier and e in tier)]
        for encoding in placed:
            self._let_state_go(encoding)
            if encoding.num_readers:
                self._store.residency.leave([encoding], reading=True)
            elif tier is not None:
                tier.on_filled(encoding)
        numbers = {"messages": len(placed), "tokens": sum(e.num_tokens for e in placed)}
        for name, count in numbers.items():
            self._store.totals[f"loaded_{name}"] += count
        return numbers

    def abort(self, ticket: int) -> None:
        """Forget a load, if it has not been committed."""
        rebuilt = self._loads.pop(ticket, None)
        for encoding in rebuilt.encodings if rebuilt else ():
            self._drop(encoding)
            if self._store.hidden:
                self._store.hidden.release(encoding)

    def _reserve(self, rebuilt: Rebuilt, entries: Sequence[Mapping[str, Any]]) -> None:
        """Reserve memory for the messages' hidden states, if this engine keeps any.

        A message that nobody can name keeps them only while it is encoded again.
        """
        hidden = self._store.hidden
        for encoding, entry in zip(rebuilt.encodings, entries, strict=True):
            layers = tuple(entry["keeps"])
            if hidden is None or not layers:
                continue
            if encoding.is_given_up:
                encoding.hidden_layers = layers if encoding.is_entered else ()
                continue
            try:
                hidden.check(layers, encoding.num_tokens)
            except ChoreoError:
                for reserved in rebuilt.encodings:
                    hidden.release(reserved)
                raise
            hidden.add(encoding, layers, encoding.num_tokens)

    def _hidden_key(self, encoding: Encoding) -> int | None:
        """Key under which workers keep the encoding's hidden states; None: none are kept."""
        return self._store.hidden.find(encoding) if self._store.hidden else None

    def _share(self, encoding: Encoding) -> bool:
        """Share the blocks of a resident encoding of the same digest; False: there is none."""
        states = self._store.states
        duplicate = self._store.duplicates.most_resident(
            encoding,
            lambda duplicate: (
                duplicate.is_resident and (states is None or duplicate.state is not None)
            ),
        )
        if duplicate is None:
            return False
        self._hold(encoding, duplicate.blocks, duplicate.stored_position)
        if states is not None and duplicate.state is not None:
            states.share(encoding, duplicate.state, duplicate.state_step)
        return True

    # -- states ------------------------------------------------------------------------------

    def _has_room_for_state(self) -> bool:
        """Return whether a state is free, if the model has any, or one was given up for it."""
        states = self._store.states
        while states is not None and not states.num_free:
            # Calls that wait keep what they begin with.
            needed = {held for held in states.holding() if held.num_waiting}
            # It is written at once, and copying out would come with the next step.
            if not self._store.evict_state(needed, into_host=False):
                return False
        return True

    def _give_state(self, encoding: Encoding) -> None:
        """Give an encoding that is loaded a free state, which is written before the next step."""
        states = self._store.states
        if states is not None:
            found = states.pool.get_new_blocks(1)
            states.share(encoding, found[0], self._store.step)
            self._kept_states[encoding] = found[0]  # with the reference that it came with

    def _keep_state(self, ticket: int, encoding: Encoding) -> int | None:
        """Hold the state of an encoding until the ticket's end; its number, if there is one."""
        states = self._store.states
        if states is None or encoding.state is None:
            return None
        states.pool.touch([encoding.state])
        self._kept_states[ticket] = encoding.state
        return encoding.state.block_id

    def _let_state_go(self, kept_by: int | Encoding) -> None:
        state, states = self._kept_states.pop(kept_by, None), self._store.states
        if state is not None and states is not None:
            states.let_go(state)

    def _hold(self, encoding: Encoding, blocks: Blocks, stored_position: int) -> None:
        residency = self._store.residency
        self._store.hold(encoding, blocks, encoding.num_tokens)
        residency.move(encoding, stored_position)
        # Like a reader: whatever else wants room, or all of it, leaves the blocks where they are.
        residency.wait_for([encoding])
        residency.read([encoding])

    def _drop(self, encoding: Encoding) -> None:
        self._let_state_go(encoding)
        if encoding.num_readers:
            self._store.residency.leave([encoding], reading=True)
            self._store.residency.drop(encoding)
        elif self._store.tier is not None:
            self._store.tier.discard(encoding)

    def _adapter(self, entry: Mapping[str, Any]) -> Adapter:
        """Adapter by its weights: one that requests have brought, or that lies where it did.

        The path is looked at only if the entry is trusted.
        """
        if entry["number"] == OTHER_MODEL:
            return Adapter(bytes.fromhex(entry["weights"]), OtherModel(entry["name"]))
        request = LoRARequest(entry["name"], entry["number"], entry["path"])
        if self._lora_config is not None and entry["is_trusted"]:
            try:
                check_loadable(Path(entry["path"]).expanduser(), self._lora_config)
                self._adapters.add_from_folder(request)
            except ChoreoError:
                pass  # it is not there: its messages can be read, and not be encoded again
        weights = bytes.fromhex(entry["weights"])
        return self._adapters.of_weights(weights) or Adapter(weights, request)


def _ids(blocks: Blocks) -> list[list[int]]:
    """Numbers of blocks, by KV cache group; -1 in gaps."""
    return [[-1 if block.is_null else block.block_id for block in held] for held in blocks]


def operations(server: SnapshotServer) -> dict[str, Callable[..., Any]]:
    """Operations on saved and loaded messages, by the names that facades use."""
    names = (
        "describe",
        "release_ticket",
        "picture",
        "hold",
        "release",
        "begin",
        "allocate",
        "deallocate",
        "commit",
        "abort",
    )
    return {f"snapshot_{name}": getattr(server, name) for name in names}
