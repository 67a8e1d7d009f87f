# SPDX-License-Identifier: Apache-2.0
"""Encodings as plain data, and back: how messages pass from one process to another.

The form is that of `encodings`, `traces` and `adapters` in `snapshot/manifest.py`. It holds
the own encodings of some messages, their copies that new calls can read, and all that these would
need to be encoded again: also of messages that are freed, as recipes that no call can name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from secrets import token_bytes
from typing import Any, TypeVar

from vllm_choreo.repair.layers import LayerRanges, Range
from vllm_choreo.repair.weights import Weights
from vllm_choreo.semantics.positions import CallPlan, ParentPlan, num_span_blocks
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.encoding import Adapter, Encoding, Patch, StoredMessage
from vllm_choreo.store.hidden import needed
from vllm_choreo.store.pictures import Picture
from vllm_choreo.store.store import MessageStore

_Item = TypeVar("_Item")
_NONCE_BYTES = 16


def recipes_of(messages: Sequence[StoredMessage]) -> tuple[list[Encoding], dict[str, Any]]:
    """Encodings that `messages` have and need, each after those it needs; and as plain data.

    Of their pictures the plain data has the names (`pictures_of` has the pictures).
    """
    wanted = [message.own for message in messages]
    wanted += [copy for m in messages for copy in m.copies.values() if not copy.is_orphan]
    encodings = _in_order(wanted, lambda encoding: encoding.recipe)
    traces = _in_order([encoding.trace for encoding in encodings], _sources)
    adapters = list(dict.fromkeys(e.adapter for e in encodings if e.adapter is not None))
    index = {encoding: number for number, encoding in enumerate(encodings)}
    number_of = {trace: number for number, trace in enumerate(traces)}
    pictures = {picture.content: n for n, picture in enumerate(pictures_of(encodings))}
    return encodings, {
        "adapters": [_adapter_json(adapter) for adapter in adapters],
        "traces": [
            {
                "id": trace.id,
                "parents": [number_of[parent] for parent in trace.parents],
                "origin": None if trace.origin is None else number_of[trace.origin],
            }
            for trace in traces
        ],
        "encodings": [
            {
                **_encoding_json(encoding, index),
                "pictures": [[pictures[p.content], p.start] for p in encoding.pictures],
                "trace": number_of[encoding.trace],
                "adapter": encoding.adapter and adapters.index(encoding.adapter),
            }
            for encoding in encodings
        ],
        "pictures": [{"name": name} for name in pictures],
    }


def pictures_of(encodings: Sequence[Encoding]) -> list[Picture]:
    """All pictures that encodings show, each once."""
    found: dict[str, Picture] = {}
    for encoding in encodings:
        for picture in encoding.pictures:
            found.setdefault(picture.content, picture)
    return list(found.values())


def _in_order(wanted: Sequence[_Item], needs: Callable[[_Item], Sequence[_Item]]) -> list[_Item]:
    """All items wanted and needed, each after those it needs. No recursion: chains are long."""
    done: dict[_Item, None] = {}
    stack = list(reversed(wanted))
    while stack:
        item = stack[-1]
        missing = [need for need in needs(item) if need not in done]
        if item in done or not missing:
            done.setdefault(item)
            stack.pop()
        else:
            stack += missing
    return list(done)


def _sources(trace: Trace) -> tuple[Trace, ...]:
    return trace.parents if trace.origin is None else (*trace.parents, trace.origin)


def _adapter_json(adapter: Adapter) -> dict[str, Any]:
    request = adapter.request
    return {
        "name": request.lora_name,
        "number": request.lora_int_id,
        "path": request.lora_path,
        "weights": adapter.weights.hex(),
    }


def _encoding_json(encoding: Encoding, index: Mapping[Encoding, int]) -> dict[str, Any]:
    plan, patch = encoding.plan, encoding.patch
    assert plan is not None, "what is known has its plan"
    return {
        "message": encoding.message.id,
        "is_copy": encoding.is_copy,
        "tokens": list(encoding.token_ids or ()),
        "parents": [index[parent] for parent in encoding.parents],
        "spans": [[span.start, span.stop, span.offset] for span in plan.parents],
        "new_offset": plan.new_offset,
        "exact": plan.exact,
        "repaired_tokens": plan.repaired_tokens,
        "weights": plan.weights and list(plan.weights),
        "patch": patch
        and {
            "source": index[patch.source],
            "start": patch.start,
            "runs": [list(run) for run in patch.runs],
            "layers": patch.layers and [list(r) for r in patch.layers.ranges],
        },
        "keeps": list(encoding.hidden_layers),
        "is_untrusted": encoding.is_untrusted,
    }


# -- back ----------------------------------------------------------------------------------------


class Rebuilt:
    """Messages and encodings made of plain data, which no call can name yet.

    Args:
        recipes: plain data of `recipes_of`; checked, see `snapshot/manifest.py`.
        named: the encoding that is a message's own, by the id that calls will name it by. The
            others are there as if their messages had been freed.
        session, tenant: the session and tenant of the messages.
        adapter_of: makes the adapter of an entry of `adapters`.
        pictures: pictures of the entries of `pictures`.

    Attributes:
        encodings: encodings in the order of `recipes`.
        messages: messages that calls will name.
    """

    def __init__(
        self,
        recipes: Mapping[str, Any],
        named: Mapping[str, int],
        store: MessageStore,
        session: str,
        tenant: str,
        adapter_of: Callable[[Mapping[str, Any]], Adapter],
        pictures: Sequence[Picture] = (),
    ) -> None:
        self._store = store
        self._pictures = pictures
        self._adapters = [adapter_of(entry) for entry in recipes["adapters"]]
        self._traces: list[Trace] = []
        for entry in recipes["traces"]:
            origin = entry["origin"]
            parents = tuple(self._traces[parent] for parent in entry["parents"])
            self._traces.append(
                Trace(entry["id"], parents, None if origin is None else self._traces[origin])
            )
        self._named = {
            message_id: StoredMessage(message_id, session, tenant) for message_id in named
        }
        for message in self._named.values():
            message.own = Encoding(message, Trace(message.id))  # copies may come before theirs
        self._session, self._tenant = session, tenant
        own = set(named.values())
        self.encodings: list[Encoding] = []
        for number, entry in enumerate(recipes["encodings"]):
            self.encodings.append(self._encoding(entry, is_own=number in own))
        for encoding in self.encodings:  # that a copy is one is known when its message has its own
            # An untrusted copy is none that a call could find: those have no nonce.
            is_lost = bool(encoding.nonce) or any(e.is_given_up for e in encoding.recipe)
            encoding.is_orphan = encoding.is_copy and is_lost
        self.messages = list(self._named.values())

    def _encoding(self, entry: Mapping[str, Any], *, is_own: bool) -> Encoding:
        message = self._named.get(entry["message"]) if is_own or entry["is_copy"] else None
        if message is None:  # of a message that nobody names any more
            message = StoredMessage(entry["message"], self._session, self._tenant, freed=True)
        parents = tuple(self.encodings[parent] for parent in entry["parents"])
        adapter = None if entry["adapter"] is None else self._adapters[entry["adapter"]]
        trace, patch = self._traces[entry["trace"]], None
        if entry["patch"] is not None:
            runs = tuple((start, stop) for start, stop in entry["patch"]["runs"])
            source = self.encodings[entry["patch"]["source"]]
            layers = self._layers(entry["patch"]["layers"])
            patch = Patch(source, entry["patch"]["start"], runs, layers)
        encoding = Encoding(message, trace, adapter, list(entry["tokens"]), parents, patch=patch)
        encoding.plan = self._plan(entry, parents)
        encoding.pictures = tuple(
            replace(self._pictures[number], start=start)
            for number, start in entry.get("pictures", ())
        )
        encoding.nonce = token_bytes(_NONCE_BYTES) if entry["is_untrusted"] else b""
        if is_own or message.freed:
            message.own = encoding
        self._store.identify(encoding)
        return encoding

    def _layers(self, ranges: Sequence[Range] | None) -> LayerRanges | None:
        """Layers of a patch; raises ChoreoError if this engine does not run them."""
        if ranges is None:
            return None
        ranges = tuple((first, stop) for first, stop in ranges)
        index = needed(self._store.hidden, "uri", ranges)
        index.check_ranges(ranges, "uri")
        return LayerRanges(ranges, index.num_layers)

    def _plan(self, entry: Mapping[str, Any], parents: Sequence[Encoding]) -> CallPlan:
        """Plan of an entry, as in `Context.plan`: the same positions, in this engine's blocks."""
        spans = tuple(
            ParentPlan(parent.message.id, *span)
            for parent, span in zip(parents, entry["spans"], strict=True)
        )
        size = self._store.block_size
        num_blocks = sum(num_span_blocks(span.start, span.stop, size) for span in spans)
        if entry["patch"] is not None:
            num_blocks -= entry["patch"]["start"] // size
        return CallPlan(
            spans,
            entry["new_offset"],
            size * num_blocks,
            entry["exact"],
            entry["repaired_tokens"],
            is_placed=self._store.is_placed,
            weights=entry["weights"] and Weights(*entry["weights"]),
        )

    def register(self) -> None:
        """Let calls name the messages, and other encodings start from theirs.

        Raises:
            NameTakenError: one of the names is taken; then nothing has changed.
        """
        self._store.register(self.messages)
        for encoding in self.encodings:
            message = encoding.message
            if message.freed:
                continue
            if encoding.is_copy and not encoding.is_orphan:
                self._store.register_copy(encoding)
            if not encoding.is_orphan and not encoding.nonce:
                self._store.duplicates.add(encoding)
