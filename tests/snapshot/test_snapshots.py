# SPDX-License-Identifier: Apache-2.0
"""Snapshots without an engine: files that others can read, and what becomes of half of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.snapshot.saved_files import MODEL, found, kept_of, save, save_whole
from tests.store.test_exact import _encoded as encoded
from tests.store.test_exact import _whole as whole
from tests.store.test_store import SIZE, Pool
from vllm_choreo.config import ServerConfig
from vllm_choreo.engine.worker.block_bytes import BlockBytes
from vllm_choreo.errors import (
    ChoreoError,
    KeptError,
    LimitError,
    NameTakenError,
    UnknownKeptError,
)
from vllm_choreo.ops.layout import Layout, write_kv
from vllm_choreo.server import snapshot_folders as served
from vllm_choreo.server import tenants
from vllm_choreo.snapshot import file_locks, keys
from vllm_choreo.snapshot.loading import loading
from vllm_choreo.snapshot.manifest import (
    PICTURED_FORMAT,
    checked_manifest,
    manifest_bytes,
    read_manifest,
    tenant_digest,
)
from vllm_choreo.snapshot.origin import Origin, all_heads, concat_heads
from vllm_choreo.snapshot.signature import differences
from vllm_choreo.snapshot.steps import Ask, drive
from vllm_choreo.snapshot.storage import SnapshotFolder
from vllm_choreo.snapshot.streams import ReadAhead
from vllm_choreo.snapshot.tensors import (
    KVShape,
    check_header,
    chunks,
    header_bytes,
    header_size,
    is_finite,
)
from vllm_choreo.store.exact import exact_chain, is_exact
from vllm_choreo.store.recipes import Rebuilt, recipes_of
from vllm_choreo.store.repaired import repaired_chain
from vllm_choreo.store.store import MessageStore

SHAPE = KVShape.of(
    "float32",
    [[2, 8, 8], [1, 4, 4], [2, 8, 8]],
    ("bfloat16", 24),
    states=[("float32", [3, 2]), ("bfloat16", [4])],
).keeping([1, 2])


# -- tensors ---------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 4000), st.data())
def test_chunks_are_all_of_an_encoding_in_the_order_of_its_file(
    tokens: int, most: int, data: st.DataObject
) -> None:
    firsts = data.draw(st.just([0, 0, 0]) | st.lists(st.integers(0, tokens - 1), min_size=3))
    shape = SHAPE.beginning_at(firsts)
    end, tensors = 0, list(shape.tensors(tokens).values())
    for chunk in chunks(shape, tokens, most):
        there = shape.rows(chunk.first, tokens)
        start = tensors[chunk.first]["data_offsets"][0]
        start += (chunk.start - there.start) * shape.row_bytes(chunk.first)
        rows = sum(map(shape.row_bytes, range(chunk.first, chunk.last)))
        assert start == end and chunk.num_bytes == rows * (chunk.stop - chunk.start)
        assert chunk.num_bytes <= most or chunk.stop - chunk.start == 1
        assert range(chunk.start, chunk.stop) == there or chunk.last == chunk.first + 1
        assert all(shape.rows(part, tokens) == there for part in range(chunk.first, chunk.last))
        parts = {*range(chunk.first, chunk.last)}
        kinds = [parts & {*range(*of_kind)} for of_kind in ((0, 6), (6, 8), (8, 9), (9, 10))]
        assert parts in kinds, "keys and values, hidden states, or a state's tensors of one dtype"
        hidden = SHAPE.hidden_layers(chunk.first, chunk.last)
        assert hidden == tuple(part - 5 for part in sorted(kinds[1]))
        state = SHAPE.state_tensors(chunk.first, chunk.last)
        assert [*state] == sorted(part - 8 for part in kinds[2] | kinds[3])
        end += chunk.num_bytes
    assert end == shape.num_bytes(tokens) == tensors[-1]["data_offsets"][1]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -math.nan, None], ids=str)
def test_numbers_of_a_chunk_are_finite(name: str, wrong: float | None) -> None:
    dtype, shape = getattr(torch, name), KVShape.of(name, [[1, 8, 8]])
    (chunk,) = chunks(shape, 3)
    numbers = torch.randn(48).to(dtype)
    numbers[:2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])
    if wrong is not None:
        numbers[17] = wrong
    data = numbers.view(torch.uint8).numpy().tobytes()
    assert is_finite(data, chunk, shape) == (wrong is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("gaps", [0, 2])
def test_files_are_safetensors_and_come_back_as_they_were(
    tmp_path: Path, dtype: torch.dtype, layout: Layout, gaps: int
) -> None:
    """Written by two workers that share the heads, read by one and by four.

    The second layer is in a KV cache group of its own, in which the first blocks may be gaps.
    """
    tokens, size = 9, 4
    blocks = [[3, 0, 5], [-1] * gaps + [1, 4, 2][gaps:]]
    # Of latents a file has what rotates as keys, and the latents as values.
    is_latent = layout is Layout.LATENT
    sizes, width = ([3, 8], 11) if is_latent else ([8, 8], 16)
    value_size = 8 if is_latent else None
    shape = KVShape.of(str(dtype).removeprefix("torch."), [[2, *sizes], [2, *sizes]])
    shape = shape.beginning_at([0, gaps * size])
    generator = torch.Generator().manual_seed(1)
    wanted = [
        torch.randn(tokens, 2, size, generator=generator).to(dtype) for size in (*sizes, *sizes)
    ]
    tables = [torch.tensor(of_group) for of_group in blocks]
    wanted = [part[first:] for part, first in zip(wanted, (0, 0, *[gaps * size] * 2), strict=True)]

    def caches(heads: int) -> list[torch.Tensor]:
        return [torch.zeros(6, heads, size, width, dtype=dtype) for _ in range(2)]

    halves = [caches(1), caches(1)]
    for rank, own in enumerate(halves):
        for layer, cache in enumerate(own):
            key, value = (part[:, rank : rank + 1] for part in wanted[2 * layer : 2 * layer + 2])
            key = torch.cat([value, key], dim=-1) if is_latent else key
            there = torch.arange(tokens)[tokens - len(key) :]
            slots = tables[layer][there // size] * size + there % size
            write_kv(cache, slots, key, value, layout)
    by_groups: dict[str, Any] = {"value_size": value_size, "groups": [0, 1]}
    writers = [BlockBytes(own, layout, rank, 2, **by_groups) for rank, own in enumerate(halves)]
    origin = Origin("s", "t", {}, num_ranks=2, num_heads=2)
    assert all_heads([writer.shape() for writer in writers], origin) == [[2, *sizes]] * 2
    path = tmp_path / "one.safetensors"
    content = header_bytes(shape, tokens, {"model": "m"})
    for chunk in chunks(shape, tokens, 700):
        parts = chunk.first, chunk.last
        read = [writer.read(blocks, parts, chunk.start, chunk.stop) for writer in writers]
        content += concat_heads(read, chunk, shape, origin)
    path.write_bytes(content)
    tensors = load_file(path)  # an independent reader
    assert list(tensors) == sorted(shape.tensors(tokens))
    for part in range(4):
        name = f"layers.{part // 2}.{'values' if part % 2 else 'keys'}"
        assert torch.equal(tensors[name], wanted[part])

    firsts = [(0, 0), (1, gaps * size)]
    for ranks in (1, 4):
        heads = max(1, 2 // ranks)
        readers = [
            BlockBytes(caches(heads), layout, rank, ranks, **by_groups) for rank in range(ranks)
        ]
        _write(readers, path, shape, tokens, blocks)
        for rank, reader in enumerate(readers):
            first = rank * 2 // ranks
            mine = [part[:, first : first + heads].contiguous() for part in wanted]
            expected = b"".join(part.view(torch.uint8).numpy().tobytes() for part in mine)
            read = [reader.read(blocks, (2 * n, 2 * n + 2), f, tokens) for n, f in firsts]
            assert b"".join(read) == expected


def _write(
    readers: list[BlockBytes], path: Path, shape: KVShape, tokens: int, blocks: list[list[int]]
) -> None:
    with ReadAhead(path.open("rb")) as ahead:
        header = ahead.read(header_size(ahead.read(8), path.stat().st_size))
        check_header(header, shape, tokens)
        with pytest.raises(ValueError, match="keys"):
            check_header(header, shape, tokens + 1)
        listed = list(chunks(shape, tokens, 300))
        for chunk, piece in zip(listed, ahead.pieces(c.num_bytes for c in listed), strict=True):
            for reader in readers:
                parts = chunk.first, chunk.last
                reader.write(piece, [2, 2], blocks, parts, chunk.start, chunk.stop)
        ahead.rest()
        assert ahead.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_heads_that_workers_have_twice_are_kept_once() -> None:
    origin = Origin("s", "t", {}, num_ranks=4, num_heads=2)
    shapes = [{"layers": [[1, 3, 3]]}] * 4
    shape = KVShape.of("float16", all_heads(shapes, origin))
    assert shape.layers == ((2, 3, 3),)
    (chunk,) = chunks(shape, 2)
    given = [bytes([rank]) * 24 for rank in range(4)]  # 2 parts, 2 tokens, a head of 6 bytes
    rows = np.frombuffer(concat_heads(given, chunk, shape, origin), np.uint8).reshape(2, 2, 2, 6)
    assert (rows[:, :, 0] == 0).all() and (rows[:, :, 1] == 2).all()


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://kept-{}"])
def test_a_save_replaces_what_was_there(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    with pytest.raises(UnknownKeptError):
        found(uri)
    for token in (1, 2):
        save(uri, token, bytes([token]))
        assert found(uri) == (token, bytes([token]))
    folder = SnapshotFolder(uri)
    names = [entry["name"] for entry in folder._fs.ls(folder._path, detail=True)]
    assert len(names) == 2, "the old data is gone"
    folder.delete()
    with pytest.raises(UnknownKeptError):
        found(uri)


def _save_and_be_killed(at: str, uri: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.snapshot.saved_files", at, uri], cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["data", "manifest", "move", "clean"])
def test_whoever_is_killed_leaves_the_old_or_the_new(at: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1, b"old")
    _save_and_be_killed(at, uri)
    assert found(uri) == ((2, b"new") if at == "clean" else (1, b"old"))
    save(uri, 3, b"next")
    assert found(uri) == (3, b"next")


@pytest.mark.parametrize("at", ["data", "manifest", "move"])
def test_the_next_save_removes_what_a_killed_one_has_left(at: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1)
    _save_and_be_killed(at, uri)
    assert len(list(Path(uri).iterdir())) > 2
    save(uri, 3)
    assert len(list(Path(uri).iterdir())) == 2


def test_a_save_removes_nothing_of_another_that_is_under_way(tmp_path: Path) -> None:
    mine = tmp_path / "notes.safetensors"
    mine.write_bytes(b"x")
    save(str(tmp_path), 1)
    other = SnapshotFolder(tmp_path)
    other.make()
    name, file = other.create()
    with file:
        file.write(b"x")
    save(str(tmp_path), 2)
    assert mine.exists() and (tmp_path / name).exists()
    other.publish(manifest_bytes(kept_of(3, name)), set())
    assert found(str(tmp_path)) == (3, b"x")
    save(str(tmp_path), 4)
    assert mine.exists() and not (tmp_path / name).exists()


def test_elsewhere_what_a_killed_save_has_left_is_removed_a_day_later() -> None:
    uri = f"memory://left-{secrets.token_hex(4)}"
    folder = SnapshotFolder(uri)
    folder.make()
    for day in ("20200101", "20990101"):
        folder._fs.pipe_file(f"{folder._path}/{day}T000000-00000000-00000.safetensors", b"x")
    save(uri, 1)
    names = [entry["name"].rpartition("/")[2] for entry in folder._fs.ls(folder._path)]
    assert len(names) == 3 and not any(name.startswith("2020") for name in names)


def test_a_save_leaves_what_is_read_until_that_is_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1, b"old")
    reader = SnapshotFolder(uri)
    (entry,) = read_manifest(reader)["encodings"]
    with reader.reading({entry["data"]["file"]}):
        save(uri, 2)
        save(uri, 3)
        with reader.open(entry["data"]["file"])[0] as file:
            assert file.read() == b"old"
    assert len(list(Path(uri).iterdir())) == 3, "the second one was read by nobody"
    save(uri, 4)
    assert found(uri)[0] == 4 and len(list(Path(uri).iterdir())) == 2


class _Engine:
    """What a load asks for.

    Args:
        overtaken: is called with the token of the manifest that was read.

    Attributes:
        written: keys and values.
    """

    def __init__(self, overtaken: Callable[[int], None]) -> None:
        self.written = b""
        self._overtaken = overtaken

    def answer(self, ask: Ask) -> Any:
        name, *args = ask.args
        if ask.what == "session":
            return name(*args)
        if name == "snapshot_begin":
            self._overtaken(args[2]["encodings"][0]["tokens"][0])
        if name == "choreo_write_kv":
            self.written += bytes(args[0])
        return {
            "choreo_kv_shape": [
                {
                    "dtype": "float32",
                    "layers": [[1, 4, 4]],
                    "groups": [0],
                    "scales": [],
                    "hidden": ["float32", 0],
                    "states": [],
                },
            ],
            "snapshot_begin": 0,
            "snapshot_allocate": {
                "blocks": [[0]],
                "firsts": [0],
                "in_host": False,
                "hidden": None,
                "state": None,
            },
        }.get(name)


def _load_whole(uri: str, overtaken: Callable[[int], None]) -> tuple[int, bytes]:
    """The token of the message that is kept, and its keys and values."""
    engine, target = (
        _Engine(overtaken),
        Origin("new", tenant_digest("a"), MODEL, num_ranks=1, num_heads=1),
    )

    def names_of(session: str, ids: Sequence[str]) -> dict[str, str]:
        return {message_id: f"new/{message_id}" for message_id in ids}

    steps = loading(
        *(SnapshotFolder(uri), target, "a", names_of),
        *(lambda messages: None, lambda: None, "refuse", False),
    )
    (message,) = drive(steps, engine.answer).messages
    return message.token_ids[0], engine.written


def test_who_loads_while_another_process_saves_gets_the_old_or_the_new(tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    command = [sys.executable, "-m", "tests.snapshot.saved_files", "again", uri]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as saver:

        def overtaken(token: int) -> None:
            """Until what was read has been replaced."""
            assert saver.stdout is not None
            while int(saver.stdout.readline()) < token + 2:
                pass

        try:
            overtaken(0)
            tokens = []
            for _ in range(20):
                token, written = _load_whole(uri, overtaken)
                assert written == np.full(8, token, np.float32).tobytes()
                tokens.append(token)
        finally:
            saver.kill()
    assert tokens == sorted(set(tokens))
    save_whole(uri, 1)
    assert len(list((tmp_path / "kept").iterdir())) == 2, "nothing is left of it"


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://often-{}"])
def test_who_is_overtaken_again_and_again_loads_the_last_one(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the folder is followed by a save, which removes what was to be read."""
    uri, looks = scheme.format(tmp_path), itertools.count(2)
    save_whole(uri, 1)
    look, is_saving = SnapshotFolder.manifest, False

    def overtaken(folder: SnapshotFolder) -> bytes:
        nonlocal is_saving
        content = look(folder)
        if not is_saving and (token := next(looks)) <= 60:
            is_saving = True
            save_whole(uri, token)
            is_saving = False
        return content

    monkeypatch.setattr(SnapshotFolder, "manifest", overtaken)
    token, written = _load_whole(uri, lambda token: None)
    assert token == 60 and written == np.full(8, 60, np.float32).tobytes()


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://gone-{}"])
def test_a_refused_save_leaves_nothing(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    folder = SnapshotFolder(uri)
    folder.make()
    folder.create()[1].close()
    folder.withdraw()
    assert uri.rpartition("/")[2] not in SnapshotFolder(uri.rpartition("/")[0]).names()
    save(uri, 1)
    folder.make()
    folder.create()[1].close()
    folder.withdraw()
    assert found(uri) == (1, b"new")


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://half-{}"])
def test_what_was_never_finished_can_be_deleted(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    folder = SnapshotFolder(uri)
    folder.make()
    folder.create()[1].close()
    folder.delete()
    with pytest.raises(UnknownKeptError):
        folder.delete()


def test_all_that_lies_in_a_folder_has_its_size(tmp_path: Path) -> None:
    save(str(tmp_path / "one"), 1, b"x" * 10_000)
    (tmp_path / "empty").mkdir()
    left = SnapshotFolder(tmp_path / "left")
    left.make()
    with left.create()[1] as file:
        file.write(b"x" * 100_000)
    assert SnapshotFolder(tmp_path).sizes() == {
        "empty": 4096,
        "left": 25 * 4096 + 4096,
        "one": 3 * 4096 + 4096 + 4096,  # data, manifest, folder
    }


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_one_could_read_for_ever_is_no_file(what: str, tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    for path in list(tmp_path.iterdir()):
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        folder = SnapshotFolder(tmp_path)
        reads: list[Callable[[], Any]] = [partial(folder.open, path.name)]
        if path.name == "manifest.json":
            reads.append(folder.manifest)
        for read in reads:
            with pytest.raises(KeptError, match="no plain file") as refusal:
                read()
            assert str(refusal.value.value).endswith(path.name)


@pytest.mark.parametrize("uri", ["nowhere://x", "s3://bucket/x"])
def test_storage_that_there_is_not(uri: str) -> None:
    with pytest.raises(KeptError, match="cannot be reached"):
        SnapshotFolder(uri)


# -- manifests -------------------------------------------------------------------------------------


def test_no_byte_of_a_manifest_can_change(tmp_path: Path) -> None:
    save(str(tmp_path), 7)
    path = tmp_path / "manifest.json"
    content, rng = path.read_bytes(), random.Random(1)
    right = read_manifest(SnapshotFolder(tmp_path))
    for at in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:at])
        with pytest.raises(KeptError, match="manifest"):
            read_manifest(SnapshotFolder(tmp_path))
        flipped = content[at] ^ (1 << rng.randrange(8))
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        try:
            assert read_manifest(SnapshotFolder(tmp_path)) == right  # white space, say
        except KeptError as error:
            assert error.value == f"{tmp_path}/manifest.json"


def test_who_has_the_key_is_believed_and_nobody_else(tmp_path: Path) -> None:
    mine, path = b"k" * 32, tmp_path / "manifest.json"
    kept = kept_of(7, None)

    def is_trusted(keep_key: bytes | None) -> bool:
        return checked_manifest(SnapshotFolder(tmp_path, keep_key=keep_key)).is_trusted

    path.write_bytes(manifest_bytes(kept, mine))
    assert is_trusted(mine) and not is_trusted(b"other key" * 4) and not is_trusted(None)
    forged = {**kept, "tenant": tenant_digest("b")}
    file = json.loads(path.read_bytes())
    for content in (
        manifest_bytes(forged),
        manifest_bytes(forged, b"other key" * 4),
        json.dumps({**json.loads(manifest_bytes(forged)), "hmac": file["hmac"]}).encode(),
        json.dumps({**file, "hmac": file["sha256"]}).encode(),
        json.dumps({**file, "hmac": 5}).encode(),
    ):
        path.write_bytes(content)
        assert not is_trusted(mine), "anybody can make the plain digest"


@pytest.mark.parametrize("name", ["../outside", "a/b", ".x", "a\0b", 3, ["x"], {"a": 1}, True])
def test_files_that_a_forged_manifest_names_are_not_opened(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are locked before the manifest is checked, for others may remove them."""
    (tmp_path / "outside").touch()
    opened: list[str] = []
    monkeypatch.setattr(file_locks, "lock_shared", opened.append)
    uri = tmp_path / "kept"
    save_whole(str(uri), 1)
    _load_whole(str(uri), lambda token: None)
    assert opened.pop().startswith(f"{uri}/") and not opened
    kept = json.loads((uri / "manifest.json").read_bytes())["kept"]
    kept["encodings"][0]["data"]["file"] = name
    (uri / "manifest.json").write_bytes(manifest_bytes(kept))
    with pytest.raises(KeptError, match="damaged"):
        _load_whole(str(uri), lambda token: None)
    assert not opened


def test_a_programs_key_is_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key = keys.own_key("")
    path = tmp_path / "config" / "vllm-choreo" / "keep.key"
    assert key is not None and len(key) == 64 and path.stat().st_mode & 0o777 == 0o600
    keys._users_key.cache_clear()
    assert keys.own_key("") == key, "the next process has the same"
    keys._make(path)  # two at once
    assert keys.key_of_file(str(path)) == key and list(path.parent.iterdir()) == [path]
    for content in (b"", b"short", None):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ChoreoError, match="openssl") as refusal:
            keys.own_key(str(path))
        assert refusal.value.value == str(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    assert keys.own_key("") is None


def _wrong() -> Iterator[dict[str, Any]]:
    def changed(**fields: Any) -> dict[str, Any]:
        kept = json.loads(json.dumps(kept_of(1, None)))
        kept["encodings"][0] |= fields
        return kept

    yield changed(parents=[0], spans=[[0, 1, 0]])
    yield changed(parents=[0])
    yield changed(spans=[[0, 1, 0]])
    yield changed(trace=1)
    yield changed(adapter=0)
    yield changed(tokens=[])
    yield changed(tokens=[-1])
    yield changed(new_offset=-1)
    yield changed(new_offset=True)
    yield changed(exact=1)
    yield changed(is_untrusted=0)
    for weights in ([0.9], [0.9, 0], [0.9, 1], [1e-300, 1.0], [0.9, -1.0], "0.9", 0.9):
        yield changed(weights=weights)
    yield changed(patch={"source": 0, "start": 0, "runs": []})
    yield changed(is_copy=True)
    yield changed(message="s/1")
    for file in ("../x", "a/b", ".x", 3):
        yield changed(data={"file": file, "bytes": 1, "sha256": "", "stored_position": 0})
    for layers in ([0], [2, 2], [1.0], None):
        yield changed(keeps=layers)
    for runs, ranges in (
        ([[0, 1]], []),
        ([[0, 1]], [[0, 0]]),
        ([[0, 1]], [[0, 2], [2, 3]]),
        ([], [[0, 2]]),
        ([[0, 1]], [[1, 2]]),  # the source does not keep what layer 1 was given
    ):
        kept = changed(patch={"source": 0, "start": 0, "runs": runs, "layers": ranges})
        source = {**kept_of(1, None)["encodings"][0], "keeps": [2]}
        kept["encodings"].insert(0, source)
        kept["messages"] = []
        yield kept
    picture = {"name": "a", "file": "a", "bytes": 1, "sha256": ""}
    for wrong in ({"file": "../x"}, {"bytes": -1}, {"name": 3}):
        yield {**kept_of(1, None), "pictures": [{**picture, **wrong}]}
    for shown in ([[1, 0]], [[0, 99]], [[0, 0.5]], [[0]]):
        yield {**changed(pictures=shown), "pictures": [picture]}
    yield {**kept_of(1, None), "format": PICTURED_FORMAT + 1}
    yield {**kept_of(1, None), "traces": [{"id": "s/0", "parents": [0], "origin": None}]}


@pytest.mark.parametrize("kept", list(_wrong()), ids=str)
def test_a_manifest_that_save_did_not_write(kept: dict[str, Any], tmp_path: Path) -> None:
    """Its digest is right, and yet none of it reaches the engine."""
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with pytest.raises(KeptError, match="manifest"):
        read_manifest(SnapshotFolder(tmp_path))


def test_what_differs_between_two_models() -> None:
    mine = {"name": "a", "weights": "x", "tokenizer": "t", "dtype": "float32"}
    assert differences({**mine, "name": "b"}, mine) == []  # another folder of the same files
    assert "dtype" in differences({**mine, "dtype": "bfloat16"}, mine)[0]
    assert differences({**mine, "weights": ""}, mine)
    unknown = {**mine, "weights": ""}
    assert differences({**unknown, "name": "b"}, unknown) and not differences(unknown, unknown)


# -- recipes ---------------------------------------------------------------------------------------


def test_recipes_come_back_with_their_digests() -> None:
    """Own encodings, copies of exact calls, patches of repaired ones, and what was freed."""
    store = MessageStore(Pool(), SIZE)
    a = encoded(store, "a", 10, [])
    alone = encoded(store, "alone", 6, [])
    links = exact_chain(whole(a, alone), None, store)
    (copy,) = alone.message.copies.values()
    patched, *_ = repaired_chain(whole(a, alone), (0, 10), [(), ((1, 3),)], None, store)
    reader = encoded(store, "reader", 3, links)
    repaired = encoded(store, "repaired", 3, patched)
    store.free(a.message)
    asked = [alone.message, reader.message, repaired.message]
    encodings, told = recipes_of(asked)
    assert set(encodings) == {a, alone, copy, patched[1].encoding, reader, repaired}
    told = json.loads(json.dumps(told))
    number = {encoding: at for at, encoding in enumerate(encodings)}
    named = {m.id: number[m.own] for m in asked}
    for entry in told["encodings"]:
        entry["data"] = None

    other = MessageStore(Pool(), SIZE)
    rebuilt = Rebuilt(told, named, other, "new", "", lambda entry: pytest.fail("no adapter"))
    assert [e.digest for e in rebuilt.encodings] == [e.digest for e in encodings]
    assert [e.plan for e in rebuilt.encodings] == [e.plan for e in encodings]
    for mine, theirs in zip(rebuilt.encodings, encodings, strict=True):
        assert mine.trace.closure() == theirs.trace.closure()
    rebuilt.register()
    assert {m.id for m in other.messages("new")} == {"alone", "reader", "repaired"}
    new = {m.id: m.own for m in other.messages()}
    assert new["reader"].parents[0].is_given_up, "nobody names what was freed"
    assert recipes_of([new[m.id].message for m in asked])[1] == {
        **told,
        "encodings": [{k: v for k, v in e.items() if k != "data"} for e in told["encodings"]],
    }
    with pytest.raises(NameTakenError):
        rebuilt.register()
    # In blocks of another size the same things lie elsewhere, and are the same.
    larger = Rebuilt(told, named, MessageStore(Pool(), 2 * SIZE), "new", "", pytest.fail)
    assert [e.digest for e in larger.encodings] == [e.digest for e in encodings]


def test_untrusted_encodings_are_nobody_elses() -> None:
    """Nor is what is encoded with them; recipes are as good as anybody's."""
    store = MessageStore(Pool(), SIZE)
    a = encoded(store, "a", 10, [])
    b = encoded(store, "b", 6, whole(a))
    (copy,) = [link.encoding for link in exact_chain(whole(b), None, store)]
    _, told = recipes_of([a.message, b.message])
    for entry in told["encodings"]:
        entry["is_untrusted"] = entry["message"] != "b" or entry["is_copy"]
    named = {"a": 0, "b": 1}
    loads = []
    for session in ("x", "y"):
        loaded = Rebuilt(told, named, store, session, "", pytest.fail)
        loaded.register()
        loads.append(loaded)
    encodings = [a, b, copy, *loads[0].encodings, *loads[1].encodings]
    assert len({e.digest for e in encodings}) == len(encodings) == 9, "no two are the same"
    x, y, _ = loads[0].encodings
    assert x not in list(store.duplicates) and y.is_untrusted and not y.nonce
    assert not x.message.copies and not y.message.copies, "no call finds an untrusted copy"
    # What they claim to have been encoded with counts for nothing.
    assert not is_exact(whole(x, y), [0, 10], 16)
    links = exact_chain(whole(x, y), None, store)
    fresh = [link.encoding for link in links]
    assert is_exact(links, [0, 10], 16) and not any(e.is_untrusted for e in fresh)
    assert [e.digest for e in fresh] == [a.digest, b.digest], "and the same as anybody's"
    # Who saves them passes on what is known of them.
    assert [e["is_untrusted"] for e in recipes_of([x.message, y.message])[1]["encodings"]][:2] == [
        *(True, True)
    ]


# -- what counts against a tenant ------------------------------------------------------------------


@pytest.fixture
def _own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this process stays as it is."""
    monkeypatch.setattr(tenants, "use_secret", lambda secret: None)


@pytest.mark.usefixtures("_own_secret")
def test_all_that_a_tenant_has_saved_counts_and_can_be_deleted(tmp_path: Path) -> None:
    limits = ServerConfig(max_kept_gib_per_tenant=40_000 / 2**30, max_kept_names_per_tenant=3)
    (folders, _) = served.start(str(tmp_path), None, limits)
    assert folders is not None and folders.keep_key is not None
    assert folders.room("t", "new") == 40_000 and folders.room("t", "new", 0.5) == 20_000
    save(f"{tmp_path}/t/recipes", 1, b"")
    assert 0 < folders.room("t", "recipes", 0.5) <= 20_000
    with pytest.raises(LimitError, match="max_kept_names_per_tenant"):
        folders.room("t", "new", 0.5)  # a half of three names is one
    left = folders.folder("t", "left")  # by a save that was killed
    left.make()
    with left.create()[1] as file:
        file.write(b"x" * 20_000)
    sizes = folders.sizes("t")
    assert sizes["recipes"] > 0 and sizes["left"] > 20_000
    assert folders.room("t", "new") == 40_000 - sum(sizes.values())
    assert folders.room("t", "left") == 40_000 - sizes["recipes"], "it replaces what is there"
    assert folders.room("u", "new") == 40_000
    save(f"{tmp_path}/t/third", 1, b"")
    with pytest.raises(LimitError, match="max_kept_names_per_tenant"):
        folders.room("t", "fourth")
    folders.folder("t", "third").delete()
    save(f"{tmp_path}/t/third", 1, b"x" * 20_000)
    with pytest.raises(LimitError, match="max_kept_gib_per_tenant"):
        folders.room("t", "recipes")
    for name in folders.names("t"):
        folders.folder("t", name).delete()
    assert folders.sizes("t") == {} and folders.room("t", "new") == 40_000


@pytest.mark.usefixtures("_own_secret")
def test_servers_of_one_folder_believe_one_another(tmp_path: Path) -> None:
    first, _ = served.start(str(tmp_path), None, ServerConfig())
    second, loaded = served.start(str(tmp_path), str(tmp_path), ServerConfig())
    assert first is not None and second is not None and loaded is not None
    assert first.keep_key == second.keep_key == loaded.keep_key
    assert first.folder("t", "a").keep_key == first.keep_key
    key = tmp_path.with_name("operators.key")
    key.write_text("k" * 32)
    own, _ = served.start(str(tmp_path), None, ServerConfig(), str(key))
    assert own is not None and own.keep_key == b"k" * 32
    with pytest.raises(ChoreoError, match="openssl"):
        served.start(str(tmp_path), None, ServerConfig(), f"{key}.none")
