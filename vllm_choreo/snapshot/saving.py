# SPDX-License-Identifier: Apache-2.0
"""`save`: recipes, and keys and values if asked, into a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError, KeptError, PoolFullError, TooLongError
from vllm_choreo.semantics.message import Message, Saved
from vllm_choreo.snapshot.byte_bar import ByteBar
from vllm_choreo.snapshot.manifest import (
    FORMAT,
    PICTURED_FORMAT,
    data_files,
    manifest_bytes,
    read_manifest,
)
from vllm_choreo.snapshot.origin import Origin, by_layer, concat_heads, shape_of
from vllm_choreo.snapshot.pictures import saving_pictures
from vllm_choreo.snapshot.steps import Ask, Steps, operation, workers
from vllm_choreo.snapshot.storage import SnapshotFolder, check_size, settle
from vllm_choreo.snapshot.streams import Digested
from vllm_choreo.snapshot.tensors import KVShape, chunks, header_bytes
from vllm_choreo.wire.messages import record_json


def saving(
    messages: Sequence[Message],
    folder: SnapshotFolder,
    origin: Origin,
    encodings: bool,
    progress: bool | None,
) -> Steps[Saved]:
    """Save messages into a folder.

    Args:
        messages: complete messages of the session.
        folder: the target; its content is replaced when all is written.
        encodings: whether keys and values are kept, too.
        progress: see `ByteBar`.

    Raises:
        KeptError: the storage failed; what it held before is as it was.
        PoolFullError: a message whose keys and values were evicted does not come back.
        LimitError: there is no room for so many bytes; or, in memory, for hidden states of what
            was freed, with which a message is encoded again.
    """
    told = yield operation("describe", origin.session, [message.id for message in messages])
    try:
        folder.make()
        try:
            return (yield from _save(messages, folder, origin, told, encodings, progress))
        except BaseException:
            folder.withdraw()
            raise
    finally:
        yield operation("release_ticket", told["ticket"])


def _save(
    messages: Sequence[Message],
    folder: SnapshotFolder,
    origin: Origin,
    told: Mapping[str, Any],
    encodings: bool,
    progress: bool | None,
) -> Steps[Saved]:
    """Write the files; the caller removes them if this raises."""
    replaced = _files_of(folder)
    writer = _Writer(folder, origin, told)
    if encodings:
        yield from writer.write(messages, progress)
    sizes = [data["bytes"] for data in writer.data.values()]
    pictures = yield from saving_pictures(folder, told, sum(sizes))
    kept = _manifest(messages, origin, told, writer.data, pictures)
    content = manifest_bytes(kept, folder.keep_key)
    num_bytes = sum(sizes) + sum(picture["bytes"] for picture in pictures) + len(content)
    check_size(num_bytes, folder.max_bytes)
    folder.publish(content, replaced)
    return Saved(len(messages), len(sizes), sum(m.num_tokens for m in messages), sum(sizes))


def _files_of(folder: SnapshotFolder) -> set[str]:
    """Names of the data files that the manifest names before the save."""
    try:
        return data_files(read_manifest(folder))
    except KeptError:
        return set()  # nothing, or nothing that can be read


def _manifest(
    messages: Sequence[Message],
    origin: Origin,
    told: Mapping[str, Any],
    data: Mapping[int, Mapping[str, Any]],
    pictures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    recipes = told["recipes"]
    return {
        "format": PICTURED_FORMAT if pictures else FORMAT,
        "model": origin.signature,
        "tenant": origin.tenant,
        "session": origin.session,
        "adapters": recipes["adapters"],
        "traces": recipes["traces"],
        "pictures": list(pictures),
        "encodings": [
            {**entry, "data": data.get(number)} for number, entry in enumerate(recipes["encodings"])
        ],
        "messages": [
            {**record_json(message), "parents": [list(p) for p in message.parents], "encoding": own}
            for message, own in zip(messages, told["own"], strict=True)
        ],
    }


class _Writer:
    """Writer of keys and values of the encodings that `snapshot_describe` tells.

    Attributes:
        data: the entry of each encoding that was written, by its number.
    """

    def __init__(self, folder: SnapshotFolder, origin: Origin, told: Mapping[str, Any]) -> None:
        self.data: dict[int, dict[str, Any]] = {}
        self._folder = folder
        self._origin = origin
        self._told = told
        self._entries = told["recipes"]["encodings"]

    def write(self, messages: Sequence[Message], progress: bool | None) -> Steps[None]:
        shapes = yield workers("choreo_kv_shape")
        shape = shape_of(shapes, self._origin)
        own = self._told["own"]
        wanted = dict(zip(own, messages, strict=True))
        # A copy is no message's own: it is kept if it is there, and if calls can come to read it.
        ids = {message.id for message in messages}
        copies = [n for n in self._told["resident"] if self._entries[n]["is_copy"]]
        numbers = [*own, *(n for n in copies if self._entries[n]["message"] in ids)]
        entries = {number: self._entries[number] for number in numbers}
        groups, firsts = shapes[0]["groups"], self._told["firsts"]
        kept = {
            number: shape.keeping(entry["keeps"]).beginning_at(by_layer(firsts[number], groups))
            for number, entry in entries.items()
        }
        num_bytes = sum(kept[n].num_bytes(len(entries[n]["tokens"])) for n in numbers)
        check_size(num_bytes, self._folder.max_bytes)
        with ByteBar("saving", num_bytes, progress) as bar:
            for number in numbers:
                message = wanted.get(number)
                yield from self._write_one(number, message and message.id, kept[number], bar)

    def _write_one(
        self, number: int, message_id: str | None, shape: KVShape, bar: ByteBar
    ) -> Steps[None]:
        held = yield operation("hold", self._told["ticket"], number)
        # With states a message is read behind its chain alone, which no caller can name.
        if held is None and message_id is not None and not shape.states:
            try:
                yield Ask("encode", (message_id,))
            except TooLongError:
                return  # so long that no call can read it: it stays a recipe
            held = yield operation("hold", self._told["ticket"], number)
            if held is None:
                raise PoolFullError(
                    "the message was evicted, and what was brought back for it was evicted again: "
                    "save when less is running, or recipes alone (encodings=False)",
                    parameter="messages",
                    value=message_id,
                )
        if held is None:
            return  # a copy, or one with a state, that was evicted: it stays a recipe
        try:
            yield from self._stream(number, held, shape, bar)
        finally:
            is_whole = yield operation("release", held["ticket"])
        if not is_whole:
            raise PoolFullError(
                "calls needed the room of the message while it was saved: save when less is "
                "running, or recipes alone (encodings=False)",
                parameter="messages",
                value=message_id,
            )

    def _stream(
        self, number: int, held: Mapping[str, Any], shape: KVShape, bar: ByteBar
    ) -> Steps[None]:
        entry = self._entries[number]
        num_tokens = len(entry["tokens"])
        name, file = self._folder.create()
        with self._folder.naming(name), file, Digested(file) as digested:
            digested.write(header_bytes(shape, num_tokens, self._about(entry)))
            for chunk in chunks(shape, num_tokens):
                parts, rows = [chunk.first, chunk.last], (chunk.start, chunk.stop)
                if tensors := shape.state_tensors(*parts):
                    wanted = [tensors.start, tensors.stop]
                    (found,) = yield workers("choreo_read_state", held["state"], wanted)
                    digested.write(found)
                elif layers := shape.hidden_layers(*parts):
                    found = yield workers("choreo_read_hidden", held["hidden"], layers, *rows)
                    digested.write(found[0])  # every worker has them all
                else:
                    found = yield workers("choreo_read_kv", held["blocks"], parts, *rows)
                    digested.write(concat_heads(found, chunk, shape, self._origin))
                bar.advance(chunk.num_bytes)
            settle(file)
        self.data[number] = {
            "file": name,
            "bytes": digested.num_bytes,
            "sha256": digested.sha256,
            "stored_position": held["stored_position"],
            "firsts": list(shape.firsts),
        }

    def _about(self, entry: Mapping[str, Any]) -> dict[str, str]:
        """Metadata of a file: whose weights made it, for whoever finds the file alone."""
        model, about = self._origin.signature, {"format": str(FORMAT), "message": entry["message"]}
        about |= {"model": str(model["name"]), "model_weights": str(model["weights"])}
        if entry["adapter"] is not None:
            adapter = self._told["recipes"]["adapters"][entry["adapter"]]
            about |= {"adapter": adapter["name"], "adapter_weights": adapter["weights"]}
        return about


def check_mode_keeps(mode: str) -> None:
    """Check that a session in this mode has messages to keep.

    Raises:
        ChoreoError: a session in baseline mode has texts alone.
    """
    if mode == "baseline":
        raise ChoreoError(
            "in baseline mode messages are texts, and the engine has nothing to keep: save the "
            "texts, or open a session in mode 'choreo'",
            parameter="mode",
            value=mode,
        )
