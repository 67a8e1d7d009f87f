# SPDX-License-Identifier: Apache-2.0
"""Kept messages without an engine: files that others can read, and what becomes of half of them."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.core.kept_files import found, kept_of, save
from tests.core.test_exact import _encoded as encoded
from tests.core.test_exact import _whole as whole
from tests.core.test_store import SIZE, Pool
from vllm_choreo.engine.worker.kept_blocks import KeptBlocks
from vllm_choreo.errors import KeptError, NameTakenError, UnknownKeptError
from vllm_choreo.keep.manifest import FORMAT, manifest_bytes, read_manifest
from vllm_choreo.keep.origin import Origin, all_heads, joined
from vllm_choreo.keep.signature import differences
from vllm_choreo.keep.storage import KeptFolder
from vllm_choreo.keep.streams import ReadAhead
from vllm_choreo.keep.tensors import KVShape, check_header, chunks, header_bytes, header_size
from vllm_choreo.ops.layout import Layout, write_kv
from vllm_choreo.store.exact import exact_chain
from vllm_choreo.store.recipes import Rebuilt, recipes_of
from vllm_choreo.store.repaired import repaired_chain
from vllm_choreo.store.store import MessageStore

SHAPE = KVShape.of("float32", [[2, 8], [1, 4], [2, 8]], ("bfloat16", 24)).keeping([1, 2])


# -- tensors ---------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 4000))
def test_chunks_are_all_of_an_encoding_in_the_order_of_its_file(tokens: int, most: int) -> None:
    end, tensors = 0, list(SHAPE.tensors(tokens).values())
    for chunk in chunks(SHAPE, tokens, most):
        start = tensors[chunk.first]["data_offsets"][0] + chunk.start * SHAPE.row_bytes(chunk.first)
        rows = sum(map(SHAPE.row_bytes, range(chunk.first, chunk.last)))
        assert start == end and chunk.num_bytes == rows * (chunk.stop - chunk.start)
        assert chunk.num_bytes <= most or chunk.stop - chunk.start == 1
        assert (chunk.start, chunk.stop) == (0, tokens) or chunk.last == chunk.first + 1
        assert chunk.last <= 6 or chunk.first >= 6, "keys and values, or hidden states"
        hidden = SHAPE.hidden_layers(chunk.first, chunk.last)
        assert hidden == (1, 2)[max(0, chunk.first - 6) : max(0, chunk.last - 6)]
        end += chunk.num_bytes
    assert end == SHAPE.token_bytes * tokens == tensors[-1]["data_offsets"][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(Layout))
def test_files_are_safetensors_and_come_back_as_they_were(
    tmp_path: Path, dtype: torch.dtype, layout: Layout
) -> None:
    """Written by two workers that share the heads, read by one and by four."""
    tokens, size, blocks = 9, 4, [3, 0, 5]
    shape = KVShape.of(str(dtype).removeprefix("torch."), [[2, 8], [2, 8]])
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(4, tokens, 2, 8, generator=generator).to(dtype)
    slots = torch.tensor([blocks[i // size] * size + i % size for i in range(tokens)])

    def caches(heads: int) -> list[torch.Tensor]:
        return [torch.zeros(6, heads, size, 16, dtype=dtype) for _ in range(2)]

    halves = [caches(1), caches(1)]
    for rank, own in enumerate(halves):
        for layer, cache in enumerate(own):
            parts = wanted[2 * layer : 2 * layer + 2, :, rank : rank + 1]
            write_kv(cache, slots, parts[0], parts[1], layout)
    writers = [KeptBlocks(own, layout, rank, 2) for rank, own in enumerate(halves)]
    origin = Origin("s", "t", {}, num_ranks=2, num_heads=2)
    assert all_heads([writer.shape() for writer in writers], origin) == [[2, 8], [2, 8]]
    path = tmp_path / "one.safetensors"
    content = header_bytes(shape, tokens, {"model": "m"})
    for chunk in chunks(shape, tokens, 700):
        parts = chunk.first, chunk.last
        read = [writer.read(blocks, parts, chunk.start, chunk.stop) for writer in writers]
        content += joined(read, chunk, shape, origin)
    path.write_bytes(content)
    tensors = load_file(path)  # an independent reader
    assert list(tensors) == sorted(shape.tensors(tokens))
    for part in range(4):
        name = f"layers.{part // 2}.{'values' if part % 2 else 'keys'}"
        assert torch.equal(tensors[name], wanted[part])

    for ranks in (1, 4):
        heads = max(1, 2 // ranks)
        readers = [KeptBlocks(caches(heads), layout, rank, ranks) for rank in range(ranks)]
        _write(readers, path, shape, tokens, blocks)
        for rank, reader in enumerate(readers):
            first = rank * 2 // ranks
            mine = wanted[:, :, first : first + heads].contiguous()
            assert (
                reader.read(blocks, (0, 4), 0, tokens) == mine.view(torch.uint8).numpy().tobytes()
            )


def _write(
    readers: list[KeptBlocks], path: Path, shape: KVShape, tokens: int, blocks: list[int]
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
    shapes = [{"layers": [[1, 3]]}] * 4
    shape = KVShape.of("float16", all_heads(shapes, origin))
    assert shape.layers == ((2, 3),)
    (chunk,) = chunks(shape, 2)
    given = [bytes([rank]) * 24 for rank in range(4)]  # 2 parts, 2 tokens, a head of 6 bytes
    rows = np.frombuffer(joined(given, chunk, shape, origin), np.uint8).reshape(2, 2, 2, 6)
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
    folder = KeptFolder(uri)
    names = [entry["name"] for entry in folder._fs.ls(folder._path, detail=True)]
    assert len(names) == 2, "the old data is gone"
    folder.delete()
    with pytest.raises(UnknownKeptError):
        found(uri)


@pytest.mark.parametrize("at", ["data", "manifest", "move", "clean"])
def test_whoever_is_killed_leaves_the_old_or_the_new(at: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1, b"old")
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.kept_files", at, uri], cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -signal.SIGKILL
    assert found(uri) == ((2, b"new") if at == "clean" else (1, b"old"))
    save(uri, 3, b"next")
    assert found(uri) == (3, b"next")


def test_data_that_nobody_names_is_removed_a_day_later(tmp_path: Path) -> None:
    lost = tmp_path / "20200101T000000-00000000-00000.safetensors"
    lost.write_bytes(b"x")
    mine = tmp_path / "notes.safetensors"
    mine.write_bytes(b"x")
    save(str(tmp_path), 1)
    recent = KeptFolder(tmp_path)
    name, file = recent.create()  # another save that is under way
    file.close()
    save(str(tmp_path), 2)
    assert not lost.exists() and mine.exists() and (tmp_path / name).exists()


@pytest.mark.parametrize("uri", ["nowhere://x", "s3://bucket/x"])
def test_storage_that_there_is_not(uri: str) -> None:
    with pytest.raises(KeptError, match="cannot be reached"):
        KeptFolder(uri)


# -- manifests -------------------------------------------------------------------------------------


def test_no_byte_of_a_manifest_can_change(tmp_path: Path) -> None:
    save(str(tmp_path), 7)
    path = tmp_path / "manifest.json"
    content, rng = path.read_bytes(), random.Random(1)
    right = read_manifest(KeptFolder(tmp_path))
    for at in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:at])
        with pytest.raises(KeptError, match="manifest"):
            read_manifest(KeptFolder(tmp_path))
        flipped = content[at] ^ (1 << rng.randrange(8))
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        try:
            assert read_manifest(KeptFolder(tmp_path)) == right  # white space, say
        except KeptError as error:
            assert error.value == f"{tmp_path}/manifest.json"


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
    yield {**kept_of(1, None), "format": FORMAT + 1}
    yield {**kept_of(1, None), "traces": [{"id": "s/0", "parents": [0], "origin": None}]}


@pytest.mark.parametrize("kept", list(_wrong()), ids=str)
def test_a_manifest_that_save_did_not_write(kept: dict[str, Any], tmp_path: Path) -> None:
    """Its digest is right, and yet none of it reaches the engine."""
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with pytest.raises(KeptError, match="manifest"):
        read_manifest(KeptFolder(tmp_path))


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
    patched, _ = repaired_chain(whole(a, alone), (0, 10), [(), ((1, 3),)], None, store)
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
    rebuilt.enter()
    assert {m.id for m in other.messages("new")} == {"alone", "reader", "repaired"}
    new = {m.id: m.own for m in other.messages()}
    assert new["reader"].parents[0].is_given_up, "nobody names what was freed"
    assert recipes_of([new[m.id].message for m in asked])[1] == {
        **told,
        "encodings": [{k: v for k, v in e.items() if k != "data"} for e in told["encodings"]],
    }
    with pytest.raises(NameTakenError):
        rebuilt.enter()
    # In blocks of another size the same things lie elsewhere, and are the same.
    larger = Rebuilt(told, named, MessageStore(Pool(), 2 * SIZE), "new", "", pytest.fail)
    assert [e.digest for e in larger.encodings] == [e.digest for e in encodings]
