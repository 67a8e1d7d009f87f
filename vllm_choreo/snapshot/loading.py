# SPDX-License-Identifier: Apache-2.0
"""`load`: messages of a folder into a session, without encoding anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from vllm_choreo.errors import ChoreoError, KeptError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.other_model import OTHER_MODEL
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.snapshot.byte_bar import ByteBar
from vllm_choreo.snapshot.manifest import Manifest, checked_manifest, named_files
from vllm_choreo.snapshot.origin import Origin, by_layer, shape_of
from vllm_choreo.snapshot.pictures import read_pictures
from vllm_choreo.snapshot.signature import differences, is_same_text, is_variant
from vllm_choreo.snapshot.steps import Ask, Steps, operation, session, workers
from vllm_choreo.snapshot.storage import MANIFEST, SnapshotFolder
from vllm_choreo.snapshot.streams import ReadAhead
from vllm_choreo.snapshot.tensors import (
    Chunk,
    KVShape,
    OtherScalesError,
    check_header,
    chunks,
    header_size,
    is_finite,
)
from vllm_choreo.wire.messages import message_of

ON_MISMATCH = ("refuse", "encode", "variant")
# So often a load begins again because a save has replaced what it reads; where there are locks, it
# does so only if that was between the manifest and the lock.
_TRIES = 100


class Unfit(Exception):
    """Keys and values that this engine cannot take; `file` names where they lie."""

    def __init__(self, reason: str, file: str) -> None:
        super().__init__(reason)
        self.file = file

    def refusal(self) -> KeptError:
        return KeptError(
            f"{self}: load it where it fits, have its messages encoded again "
            "(on_mismatch='encode'), or save anew",
            parameter="uri",
            value=self.file,
        )


class LoadedMessages(NamedTuple):
    """Messages of a folder, now of a session.

    Attributes:
        messages: in the order in which they were saved.
        writers: weights that have written each: digest of a model's, or of an adapter's of it.
    """

    messages: list[Message]
    writers: list[str]


def loading(
    folder: SnapshotFolder,
    target: Origin,
    tenant: str,
    names_of: Callable[[str, Sequence[str]], dict[str, str]],
    admit: Callable[[Sequence[Message]], None],
    check_open: Callable[[], None],
    on_mismatch: str,
    progress: bool | None,
) -> Steps[LoadedMessages]:
    """Load the messages of a folder into a session.

    Args:
        folder: a folder with a manifest.
        target: the session and engine that the messages go to.
        tenant: name of the tenant, as the engine knows it.
        names_of: gives the ids that messages will have, by the session that they were in and their
            ids there.
        admit: has the session know messages, or raises.
        check_open: raises if the session is closed.
        on_mismatch: "refuse", "encode" or "variant".
        progress: see `ByteBar`.

    Raises:
        UnknownKeptError: nothing was saved here.
        KeptError: the messages are another tenant's, or do not fit; names the file.
        ChoreoError: they do not fit into the context, or into the session.
    """
    check_on_mismatch(on_mismatch)
    into = _Into(target, tenant, names_of, admit, check_open)
    for _ in range(_TRIES):
        content = folder.manifest()
        with folder.reading(named_files(content)):
            if folder.manifest() != content:
                continue  # its files may have been removed before they were locked
            try:
                manifest = checked_manifest(folder, content)
                messages = yield from _load(folder, manifest, into, on_mismatch, progress)
                return LoadedMessages(messages, _writers(manifest.kept))
            except KeptError:
                # Files of a generation that is not there any more cannot be read, and need not be.
                if folder.manifest() == content:
                    raise
    raise KeptError(
        "other processes save here again and again while this is read: load when they are done",
        parameter="uri",
        value=folder.label,
    )


def _writers(kept: Mapping[str, Any]) -> list[str]:
    base, adapters = kept["model"]["weights"], kept["adapters"]
    numbers = [kept["encodings"][one["encoding"]]["adapter"] for one in kept["messages"]]
    return [base if number is None else adapters[number]["weights"] for number in numbers]


class _Into(NamedTuple):
    """Target of a load; see `loading`."""

    target: Origin
    tenant: str
    names_of: Callable[[str, Sequence[str]], dict[str, str]]
    admit: Callable[[Sequence[Message]], None]
    check_open: Callable[[], None]


def _load(
    folder: SnapshotFolder,
    manifest: Manifest,
    into: _Into,
    on_mismatch: str,
    progress: bool | None,
) -> Steps[list[Message]]:
    """Load the messages of one manifest; raises as `loading`."""
    kept, target = manifest.kept, into.target
    is_same = _check_origin(kept, target, folder, on_mismatch)
    pictures = read_pictures(folder, manifest, target.signature, is_same)
    ids = [message["id"] for message in kept["messages"]]
    renamed = yield session(into.names_of, kept["session"], ids)
    recipes = _renamed(kept, renamed)
    recipes["pictures"] = pictures
    if not is_same and on_mismatch == "variant":
        recipes = _of_other_model(recipes, kept["model"])
    entries = [
        _believed(entry, manifest.is_trusted, is_same, on_mismatch)
        for entry in recipes["encodings"]
    ]
    recipes["encodings"] = entries
    trusted = {"is_trusted": manifest.is_trusted}
    recipes["adapters"] = [{**adapter, **trusted} for adapter in recipes["adapters"]]
    messages = _messages(kept, recipes, renamed)
    named = {renamed[m["id"]]: m["encoding"] for m in kept["messages"]}
    ticket = yield operation("begin", target.session, into.tenant, recipes, named)
    try:
        yield from _Reader(folder, target, ticket, on_mismatch).read(entries, progress)
        yield session(into.admit, messages)
        yield operation("commit", ticket)
    except BaseException:
        yield operation("abort", ticket)
        raise
    try:
        yield session(into.check_open)
    except BaseException:
        # It was closed before the engine knew these messages, which nobody else would free.
        yield Ask("operation", ("free", target.session, list(named)))
        raise
    return messages


def _believed(
    entry: Mapping[str, Any], is_trusted: bool, is_same: bool, on_mismatch: str
) -> dict[str, Any]:
    """Entry of an encoding: with its data, or as a recipe; and whether the data is untrusted.

    A recipe never is: this engine makes its keys and values itself.
    """
    is_untrusted = entry["is_untrusted"] or not is_trusted
    is_left = not is_same if on_mismatch != "variant" else False
    is_left = is_left or (is_untrusted and on_mismatch == "encode")
    data = None if is_left else entry["data"]
    return {**entry, "data": data, "is_untrusted": is_untrusted and data is not None}


def check_on_mismatch(given: object) -> None:
    """Raise ChoreoError unless it is one of `ON_MISMATCH`."""
    if given not in ON_MISMATCH:
        raise ChoreoError(f"choose one of {ON_MISMATCH}", parameter="on_mismatch", value=given)


def _check_origin(
    kept: Mapping[str, Any], target: Origin, folder: SnapshotFolder, on_mismatch: str
) -> bool:
    """Return whether the engine's model has made the keys and values.

    Raises:
        KeptError: not even the recipes fit, what does not fit is to be refused, or another model
            is no variant of this one.
    """
    file = f"{folder.label}/{MANIFEST}"
    if kept["tenant"] != target.tenant:
        raise KeptError(
            "these messages are another tenant's: load them in a session of the tenant that saved "
            "them",
            parameter="uri",
            value=file,
        )
    largest = max((max(entry["tokens"]) for entry in kept["encodings"]), default=0)
    if largest >= target.vocab_size or not is_same_text(kept["model"], target.signature):
        raise KeptError(
            f"the tokens of these messages are those of {kept['model'].get('name')}'s tokenizer, "
            "and mean something else to this one: make them anew from their texts",
            parameter="uri",
            value=file,
        )
    found = differences(kept["model"], target.signature)
    has_data = any(entry["data"] for entry in kept["encodings"])
    is_refused = on_mismatch == "refuse" or (
        on_mismatch == "variant" and not is_variant(kept["model"], target.signature)
    )
    if found and has_data and is_refused:
        what = f"these keys and values were made by another model: {', '.join(found)}"
        raise Unfit(what, file).refusal()
    return not found


def _of_other_model(recipes: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Recipes whose encodings are another model's, with or without an adapter.

    To this model each of these is one more adapter, which is not here.
    """
    name, weights = str(model["name"]), str(model["weights"] or model["name"])
    others = [f"{name} with {adapter['name']}" for adapter in recipes["adapters"]]
    adapters = [
        {"name": text, "number": OTHER_MODEL, "path": "", "weights": _digest(weights, apart)}
        for text, apart in zip(
            [name, *others], ["", *(a["weights"] for a in recipes["adapters"])], strict=True
        )
    ]
    entries = [
        {**entry, "adapter": 0 if entry["adapter"] is None else entry["adapter"] + 1}
        for entry in recipes["encodings"]
    ]
    return {**recipes, "adapters": adapters, "encodings": entries}


def _digest(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=32, person=b"choreo-other").hexdigest()


# -- names ---------------------------------------------------------------------------------------


def _renamed(kept: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Recipes under the new ids; messages that were not saved keep theirs."""
    return {
        "adapters": kept["adapters"],
        "traces": [{**t, "id": renamed.get(t["id"], t["id"])} for t in kept["traces"]],
        "encodings": [
            {**e, "message": renamed.get(e["message"], e["message"])} for e in kept["encodings"]
        ],
    }


def _messages(
    kept: Mapping[str, Any], recipes: Mapping[str, Any], renamed: Mapping[str, str]
) -> list[Message]:
    traces: list[Trace] = []
    for entry in recipes["traces"]:
        origin = None if entry["origin"] is None else traces[entry["origin"]]
        traces.append(Trace(entry["id"], tuple(traces[p] for p in entry["parents"]), origin))
    messages, now = [], time.perf_counter()
    for record in kept["messages"]:
        message = message_of(record, submitted=now)
        encoding = recipes["encodings"][record["encoding"]]
        usage = message.usage
        if encoding["is_untrusted"]:
            usage = replace(usage, exact=False, untrusted=True)
        parents = [p._replace(id=renamed.get(p.id, p.id)) for p in message.parents]
        messages.append(
            replace(
                message,
                id=renamed[message.id],
                usage=usage,
                parents=tuple(map(ParentSpan._make, parents)),
                trace=traces[encoding["trace"]],
            )
        )
    return messages


# -- keys and values -----------------------------------------------------------------------------


class _Reader:
    """Reader of keys and values into the engine, which believes those of a file if all is right."""

    def __init__(
        self, folder: SnapshotFolder, target: Origin, ticket: int, on_mismatch: str
    ) -> None:
        self._folder = folder
        self._target = target
        self._ticket = ticket
        self._on_mismatch = on_mismatch
        self._buffers = [bytearray(), bytearray()]

    def read(self, entries: Sequence[Mapping[str, Any]], progress: bool | None) -> Steps[None]:
        wanted = [(number, entry) for number, entry in enumerate(entries) if entry["data"]]
        if not wanted:
            return
        shapes = yield workers("choreo_kv_shape")
        shape, groups = shape_of(shapes, self._target), shapes[0]["groups"]
        total = sum(entry["data"]["bytes"] for _, entry in wanted)
        with ByteBar("loading", total, progress) as bar:
            for number, entry in wanted:
                data = entry["data"]
                place = yield operation("allocate", self._ticket, number, data["stored_position"])
                if place is None or not (place["blocks"] or place["hidden"]):
                    bar.advance(data["bytes"])
                    continue
                try:
                    firsts = data.get("firsts") or [0] * len(groups)
                    if place["blocks"]:
                        self._check_tokens(data["file"], firsts, by_layer(place["firsts"], groups))
                    kept = shape.keeping(entry["keeps"]).beginning_at(firsts)
                    yield from self._read_one(entry, place, kept, bar)
                except Unfit as unfit:
                    if self._on_mismatch != "encode":
                        raise unfit.refusal() from None
                    yield operation("deallocate", self._ticket, number)

    def _check_tokens(self, name: str, firsts: Sequence[int], needed: Sequence[int]) -> None:
        """Check that a file has the tokens that each layer needs here, or raise Unfit.

        Args:
            name: name of the file.
            firsts, needed: the first token of each layer, there and here.
        """
        file = f"{self._folder.label}/{name}"
        if len(firsts) != len(needed):
            raise Unfit(f"it has {len(firsts)} layers, not {len(needed)}", file)
        for layer, (first, need) in enumerate(zip(firsts, needed, strict=True)):
            if first > need:
                raise Unfit(
                    f"in layer {layer} it has the tokens from {first} on, for it was saved where "
                    "layers with windows keep a part of each message "
                    f"(additional_config.choreo.window_groups); here those from {need} on are kept",
                    file,
                )

    def _read_one(
        self, entry: Mapping[str, Any], place: Mapping[str, Any], shape: KVShape, bar: ByteBar
    ) -> Steps[None]:
        data, num_tokens = entry["data"], len(entry["tokens"])
        name = data["file"]
        with _unfit_if_missing(self._folder, name):
            file, size = self._folder.open(name)
            with ReadAhead(file, self._buffers) as ahead:
                if size != data["bytes"]:
                    raise self._damaged(name, f"it has {size} bytes, not {data['bytes']}")
                try:
                    length = header_size(ahead.read(8), size)
                    check_header(ahead.read(length), shape, num_tokens)
                except OtherScalesError as error:
                    raise Unfit(str(error), f"{self._folder.label}/{name}") from None
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise self._damaged(name, str(error)) from None
                listed = list(chunks(shape, num_tokens))
                pieces = ahead.pieces(chunk.num_bytes for chunk in listed)
                for chunk, piece in zip(listed, pieces, strict=True):
                    if len(piece) < chunk.num_bytes:
                        raise self._damaged(name, "it ends early")
                    if not is_finite(piece, chunk, shape):
                        raise self._damaged(name, "not all of its numbers are finite")
                    if asked := self._write(chunk, piece, place, shape):
                        yield asked
                    bar.advance(chunk.num_bytes)
                ahead.rest()
                if ahead.sha256 != data["sha256"]:
                    raise self._damaged(name, "its digest is another")

    def _write(
        self, chunk: Chunk, piece: memoryview, place: Mapping[str, Any], shape: KVShape
    ) -> Ask | None:
        """Call of the workers that writes a chunk; None: there is no place for it, nor a need."""
        parts, rows = (chunk.first, chunk.last), (chunk.start, chunk.stop)
        if tensors := shape.state_tensors(*parts):
            if place["state"] is None:
                return None
            return workers(
                "choreo_write_state", piece, place["state"], [tensors.start, tensors.stop]
            )
        if layers := shape.hidden_layers(*parts):
            key = place["hidden"]
            return key and workers("choreo_write_hidden", piece, key, layers, *rows)
        if not place["blocks"]:
            return None
        heads = [count for count, *_ in shape.layers]
        where = place["blocks"], place["in_host"]
        return workers("choreo_write_kv", piece, heads, where, parts, *rows)

    def _damaged(self, name: str, reason: str) -> Unfit:
        return Unfit(f"the file is damaged ({reason})", f"{self._folder.label}/{name}")


@contextmanager
def _unfit_if_missing(folder: SnapshotFolder, name: str) -> Iterator[None]:
    """Raise Unfit for a file that cannot be read: it is as good as damaged."""
    try:
        with folder.naming(name):
            yield
    except KeptError as error:
        raise Unfit(error.message, str(error.value)) from None
