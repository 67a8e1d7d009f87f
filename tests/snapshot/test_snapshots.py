# SPDX-License-Identifier: Apache-2.0
"""Snapshots without an engine: files that others can read, and what becomes of half of them."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.snapshot.saved_files import save
from tests.store.test_exact import _encoded as encoded
from tests.store.test_exact import _whole as whole
from tests.store.test_store import SIZE, Pool
from vllm_choreo.config import ServerConfig
from vllm_choreo.engine.worker.block_bytes import BlockBytes
from vllm_choreo.errors import (
    ChoreoError,
    LimitError,
    NameTakenError,
)
from vllm_choreo.ops.layout import Layout, write_kv
from vllm_choreo.server import snapshot_folders as served
from vllm_choreo.server import tenants
from vllm_choreo.snapshot.origin import Origin, all_heads, concat_heads
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
