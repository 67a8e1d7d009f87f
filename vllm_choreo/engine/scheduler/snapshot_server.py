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
from vllm_choreo.errors import AdapterError, ChoreoError, UnsupportedOptionError
from vllm_choreo.semantics.other_model import OTHER_MODEL, OtherModel
from vllm_choreo.semantics.positions import check_length
from vllm_choreo.store.encoding import Adapter, Encoding
from vllm_choreo.store.groups import Blocks
from vllm_choreo.store.recipes import Rebuilt, recipes_of
from vllm_choreo.store.store import MessageStore

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig


class SnapshotServer:
    """Blocks and recipes of messages that are being saved or loaded, by ticket.

    Args:
        max_model_len: tokens of the longest message that could be encoded again.
        lora_config: the engine's options of adapters; None: it takes none.
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
        may_write: Callable[[], bool] = lambda: True,
        can_turn_keys: bool = True,
    ) -> None:
        self._store = store
        self._may_write = may_write
        self._pool = pool
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._lora_config = lora_config
        self._can_turn_keys = can_turn_keys
        self._tickets = itertools.count()
        # Each with the layers of which it had hidden states: who saves it counts on them.
        self._described: dict[int, list[tuple[Encoding, tuple[int, ...]]]] = {}
        self._held: dict[int, Encoding] = {}
        self._loads: dict[int, Rebuilt] = {}

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
            `resident`: those of all encodings that can be held now; `ticket`.

        Raises:
            UnknownMessageError: there is no such message.
            UnsupportedOptionError: one needs a message with pictures.
        """
        messages = [self._store.get(session, m, "messages") for m in message_ids]
        encodings, recipes = recipes_of(messages)
        pictured = next((e.message.id for e in encodings if e.pictures), None)
        if pictured is not None:
            raise UnsupportedOptionError(
                "files keep no pictures so far, and without them a message could not be encoded "
                "again: save messages that have none, and were not encoded behind any",
                parameter="messages",
                value=pictured,
            )
        ticket = next(self._tickets)
        self._described[ticket] = [(encoding, encoding.hidden_layers) for encoding in encodings]
        return {
            "ticket": ticket,
            "recipes": recipes,
            "own": [encodings.index(message.own) for message in messages],
            "resident": [n for n, encoding in enumerate(encodings) if encoding.is_resident],
        }

    def release_ticket(self, ticket: int) -> None:
        """Forget a ticket of `describe`."""
        self._described.pop(ticket, None)

    def hold(self, ticket: int, number: int) -> dict[str, Any] | None:
        """Keep the blocks of an encoding where they are until `release`.

        Returns:
            `ticket`, `blocks`: their ids, `stored_position`, and `hidden`: the key of the hidden
            states, or None. None: the encoding, or hidden states of it, are not there any more.

        Raises:
            UnsupportedOptionError: the model has states, of which files keep none.
        """
        if self._store.states is not None:
            raise UnsupportedOptionError(
                "this model keeps a state at the end of every message, and files have keys and "
                "values alone: save messages with encodings=False, as recipes, which are encoded "
                "when they are read",
                parameter="encodings",
                value=True,
            )
        if self._store.groups.has_windows:
            raise UnsupportedOptionError(
                "in this engine layers with sliding windows keep a part of each message "
                "(additional_config.choreo.window_groups), and files have all of it: save messages "
                "with encodings=False, as recipes, which are encoded when they are read",
                parameter="encodings",
                value=True,
            )
        encoding, layers = self._described[ticket][number]
        hidden = self._hidden_key(encoding)
        if not encoding.is_resident or (layers and hidden is None):
            return None
        self._store.residency.wait_for([encoding])
        self._store.residency.read([encoding])
        held = next(self._tickets)
        self._held[held] = encoding
        return {
            "ticket": held,
            "blocks": [block.block_id for block in encoding.held_blocks],
            "stored_position": encoding.stored_position,
            "hidden": hidden,
        }

    def release(self, ticket: int) -> bool:
        """End what `hold` began; returns whether the blocks stayed where they were until now."""
        encoding = self._held.pop(ticket, None)
        if encoding is None:
            return False
        self._store.residency.leave([encoding], reading=True)
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
            TooLongError, OffsetError: a message could not be encoded again here.
            AdapterError: there is only a recipe, and its adapter is not here.
            ChoreoError: hidden states for which there is no room, or layers that cannot be run.
        """
        rebuilt = Rebuilt(recipes, named, self._store, session, tenant, self._adapter)
        for encoding, entry in zip(rebuilt.encodings, recipes["encodings"], strict=True):
            assert encoding.plan is not None
            check_length(encoding.plan, encoding.num_tokens, self._max_model_len)
            is_lost = encoding.adapter and not self._adapters.is_current(encoding.adapter)
            has_data = entry["data"] and not self._store.groups.has_windows
            if is_lost and not has_data and not encoding.message.freed:
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
            `blocks`, and `in_host`, whether they are of host memory; without blocks: another
            message has the same keys and values, and its blocks are shared; `hidden`: the key of
            the hidden states, or None. None: there is no room, or none that may be written now, or
            layers with windows have blocks of their own, and the message will be encoded when it is
            read.
        """
        place = self._allocate(ticket, number, stored_position)
        hidden = self._hidden_key(self._loads[ticket].encodings[number])
        return place and {**place, "hidden": hidden}

    def _allocate(self, ticket: int, number: int, stored_position: int) -> dict[str, Any] | None:
        encoding = self._loads[ticket].encodings[number]
        if encoding.is_given_up:
            return None  # no call will read it
        is_known = 0 <= stored_position <= self._max_model_len - encoding.num_tokens
        if not (is_known or self._can_turn_keys):
            return None  # the model cannot be given such positions, of which it would be patched
        if self._share(encoding):
            return {"blocks": [], "in_host": False}
        if self._store.groups.has_windows:
            return None  # a file does not say whose keys and values lie in which group
        need = -(-encoding.num_tokens // self._store.block_size)
        tier = self._store.tier
        is_full = self._pool.get_num_free_blocks() < need or not self._may_write()
        if is_full and tier is not None:
            position, count = stored_position, encoding.num_tokens
            if host_blocks := tier.reserve(encoding, need, count, position):
                return {"blocks": host_blocks, "in_host": True}
        if not self._may_write():
            return None
        while self._pool.get_num_free_blocks() < need:
            # The blocks are written at once, and copying out would come with the next step.
            if not self._store.evict_one([], waiting_too=False, into_host=False):
                return None
        blocks = self._pool.get_new_blocks(need)
        self._hold(encoding, [blocks], stored_position)
        self._pool.free_blocks(blocks)  # the store holds its own references
        return {"blocks": [block.block_id for block in blocks], "in_host": False}

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
        duplicate = self._store.duplicates.most_resident(
            encoding, lambda duplicate: duplicate.is_resident
        )
        if duplicate is None:
            return False
        self._hold(encoding, duplicate.blocks, duplicate.stored_position)
        return True

    def _hold(self, encoding: Encoding, blocks: Blocks, stored_position: int) -> None:
        residency = self._store.residency
        self._store.hold(encoding, blocks, encoding.num_tokens)
        residency.move(encoding, stored_position)
        # Like a reader: whatever else wants room, or all of it, leaves the blocks where they are.
        residency.wait_for([encoding])
        residency.read([encoding])

    def _drop(self, encoding: Encoding) -> None:
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


def operations(server: SnapshotServer) -> dict[str, Callable[..., Any]]:
    """Operations on saved and loaded messages, by the names that facades use."""
    names = (
        "describe",
        "release_ticket",
        "hold",
        "release",
        "begin",
        "allocate",
        "deallocate",
        "commit",
        "abort",
    )
    return {f"snapshot_{name}": getattr(server, name) for name in names}
