# SPDX-License-Identifier: Apache-2.0
"""What is kept of hidden states: the scheduler's index, and the rows in a worker's memory."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_choreo.engine.step import HiddenCapture
from vllm_choreo.engine.worker.hidden_memory import HiddenMemory
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.errors import ChoreoError, LimitError, RepairError, UnsupportedOptionError
from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.rules import ByLayers
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.encoding import Encoding, Patch, StoredMessage
from vllm_choreo.store.hidden import HiddenStateIndex, asked_layers, check_entries, check_memory

SIZE = 16


def _encoding(num_tokens: int | None) -> Encoding:
    message = StoredMessage("m", "s")
    tokens = None if num_tokens is None else [5] * num_tokens
    message.own = Encoding(message, Trace("m"), token_ids=tokens)
    return message.own


def test_the_index_counts_whole_blocks_up_to_its_limit() -> None:
    index = HiddenStateIndex(num_layers=8, row_bytes=10, block_size=SIZE, max_bytes=6 * SIZE * 10)
    known, generating = _encoding(17), _encoding(None)
    index.check((2, 5), 17)
    index.add(known, (2, 5), 17)
    assert index.num_bytes == 4 * SIZE * 10 and known.hidden_layers == (2, 5)
    index.add(generating, (7,), 30)
    assert index.num_bytes == 6 * SIZE * 10
    with pytest.raises(LimitError, match="hidden_memory_gib"):
        index.check((1,), 1)
    generating.token_ids = [5] * 4  # it stopped early
    index.check((1,), 1)
    key = index.key(known)
    index.release(known)
    index.release(known)
    assert index.take_forgotten() == (key,) and index.take_forgotten() == ()
    assert not known.hidden_layers, "no recipe begins with them"
    assert index.add_again(known) is None
    assert index.num_bytes == SIZE * 10, "only what is generated"
    with pytest.raises(ChoreoError, match="the last one is 7"):
        index.check((8,), 1)
    with pytest.raises(UnsupportedOptionError, match="hidden_memory_gib"):
        check_memory(None, (1,), 1)


def test_what_is_encoded_again_keeps_again_what_a_patch_begins_with() -> None:
    index = HiddenStateIndex(num_layers=8, row_bytes=10, block_size=SIZE, max_bytes=6 * SIZE * 10)
    source, other = _encoding(17), _encoding(20)
    patch = Patch(source, 0, ((0, 16),), LayerRanges(((2, 8),), 8))
    Encoding(source.message, Trace("m"), token_ids=source.token_ids, patch=patch)
    for encoding in (source, other):
        index.add(encoding, (2, 5), encoding.num_tokens)
        index.release(encoding)
    assert source.hidden_layers and not other.hidden_layers and not index.num_bytes
    index.add(_encoding(30), (2,), 30)
    assert index.add_again(source) is None
    assert index.add_again(source) is None, "they are kept already"
    assert index.num_bytes == 6 * SIZE * 10
    first = index.key(source)
    source.num_readers = 1
    index.clear()
    assert index.key(source) == first
    index.release(source)
    index.add(_encoding(60), (2,), 60)
    error = index.add_again(source)
    assert error is not None and error.parameter == "keep_hidden"
    assert index.num_bytes == 6 * SIZE * 10, "what has no room is not counted"


def test_what_is_cleared_has_room_until_it_is_given_up() -> None:
    """It will be encoded again, and what is new must not make that impossible."""
    index = HiddenStateIndex(num_layers=8, row_bytes=10, block_size=SIZE, max_bytes=3 * SIZE * 10)
    idle, generating = _encoding(17), _encoding(None)
    index.add(idle, (2,), 17)
    index.add(generating, (2,), 16)
    generating.encoders.add("request")
    keys = index.key(idle), index.key(generating)
    index.clear()
    assert index.take_forgotten() == (keys[0],), "workers hold nothing of it"
    assert index.find(generating) == keys[1] and index.find(idle) not in (None, *keys)
    assert index.num_bytes == 3 * SIZE * 10
    with pytest.raises(LimitError, match="0 of 480 are free"):
        index.check((2,), 1)
    assert index.add_again(idle) is None
    index.release(idle)
    index.check((2,), 17)


def test_layers_are_those_of_the_model() -> None:
    index = HiddenStateIndex(num_layers=8, row_bytes=10, block_size=SIZE, max_bytes=1000)
    assert asked_layers(ByLayers(((0, 8),)), index) is None
    assert asked_layers(ByLayers(((2, 8),)), index) == LayerRanges(((2, 8),), 8)
    assert [LayerRanges(((2, 4),), 8).charged(count) for count in (0, 1, 4, 9)] == [0, 1, 1, 3]
    with pytest.raises(RepairError, match="8 layers"):
        asked_layers(ByLayers(((2, 9),)), index)
    with pytest.raises(UnsupportedOptionError, match="hidden_memory_gib"):
        asked_layers(ByLayers(((2, 8),)), None)
    several = LayerRanges(((0, 2), (3, 5), (6, 8)), 8)
    assert several.entries == (3, 6) and several.charged(8) == 6 and not several.is_all
    check_entries(_encoding(3), LayerRanges(((0, 4),), 8))
    with pytest.raises(RepairError, match=r"keep_hidden=\[2\]"):
        check_entries(_encoding(3), LayerRanges(((2, 4),), 8))


def test_a_worker_keeps_the_rows_of_every_request() -> None:
    """Requests come in chunks, start again, and may run tokens that are run again."""
    rng, memory = random.Random(0), HiddenMemory(SIZE)
    dense = {name: torch.randn(50, 4) for name in "ab"}
    origins = {"a": 32, "b": 0}
    captures = {name: HiddenCapture(i, (3, 5), origins[name]) for i, name in enumerate("ab")}
    memory.update(captures, ())
    assert memory.layers_of(["other", "a"]) == [3, 5] and memory.layers_of(["other"]) == []
    done = {"a": 0, "b": 0}
    while min(done.values()) < 50:
        counts = {name: rng.randint(0, 50 - done[name]) for name in "ab"}
        starts = {name: max(0, done[name] - rng.randint(0, 2)) for name in "ab"}
        parts = {name: slice(starts[name], done[name] + counts[name]) for name in "ab"}
        hidden = torch.cat([torch.zeros(2, 4), *(dense[name][parts[name]] for name in "ab")])
        positions = torch.cat(
            [torch.arange(2), *(torch.arange(50)[parts[name]] + origins[name] for name in "ab")]
        )
        lengths = [0, 2, *(parts[name].stop - parts[name].start for name in "ab")]
        loc = torch.tensor(lengths).cumsum(0)
        step = StepBatch(["other", "a", "b"], loc, torch.empty(0), torch.empty(0))
        for layer in (3, 5):
            memory.capture(layer, hidden + layer, positions.expand(3, -1), step)
        done = {name: parts[name].stop for name in "ab"}
    for i, name in enumerate("ab"):
        for start, stop in ((0, 50), (7, 20), (16, 32), (49, 50)):
            rows = memory.rows(i, 5, start, stop)
            torch.testing.assert_close(rows, dense[name][start:stop] + 5)
    assert memory.num_bytes == 2 * 2 * 64 * 4 * 4
    memory.update({}, ["a", "b"])
    memory.forget([0])
    assert memory.num_bytes == 2 * 64 * 4 * 4 and memory.layers_of(["a"]) == []
