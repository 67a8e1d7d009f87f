# SPDX-License-Identifier: Apache-2.0
"""Which layers FlashAttention runs long prefills of, and how a batch says which these are."""

from types import SimpleNamespace

import pytest
import torch

from tests.engine.worker.test_span_batcher import ROTATION, SHAPE, SIZE, TOKEN_BYTES, ints, reader
from tests.ops.flash import flash_attention
from vllm_choreo.engine.worker.flash import flash_attention_of
from vllm_choreo.engine.worker.layer_kinds import LayerKind
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.ops import flash_prefills

_NUMBER = torch.ones(1)
_PLAIN = {
    "attn_backend": SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    **dict.fromkeys(("_k_scale", "_v_scale"), _NUMBER),
    **dict.fromkeys(("_k_scale_float", "_v_scale_float"), 1.0),
}
_REFUSED = {
    "backend TRITON_ATTN": {
        "attn_backend": SimpleNamespace(get_name=lambda: "TRITON_ATTN"), "has_flash": False,
    },
    "sliding window": {"sliding_window": 128},
    "slopes": {"alibi_slopes": _NUMBER},
    "sinks": {"sinks": _NUMBER},
    "8 bits": {"kv_cache_dtype": "fp8"},
}  # fmt: skip


def _layer(has_flash: bool = True, alibi_slopes=None, sinks=None, **given) -> SimpleNamespace:
    found = flash_attention if has_flash else None
    impl = SimpleNamespace(flash_attention=lambda: found, alibi_slopes=alibi_slopes, sinks=sinks)
    return SimpleNamespace(impl=impl, **{**_PLAIN, **given})


def test_plain_layers_have_it():
    assert flash_attention_of({"first": _layer(), "second": _layer()}) is flash_attention


@pytest.mark.parametrize("reason", _REFUSED)
def test_other_layers_are_refused_by_their_name(reason):
    layers = {"plain": _layer(), "odd": _layer(**_REFUSED[reason])}
    with pytest.raises(UnsupportedOptionError, match=f"layer odd .*{reason}.*leave it out") as told:
        flash_attention_of(layers)
    assert told.value.parameter == "additional_config.choreo.flash_prefills"


@pytest.fixture
def batcher(monkeypatch) -> SpanBatcher:
    monkeypatch.setattr(flash_prefills, "MIN_QUERIES", 24)
    monkeypatch.setattr(flash_prefills, "MIN_SPAN_TOKENS", 16)
    batcher = SpanBatcher(SIZE, [LayerKind(ROTATION, SHAPE, TOKEN_BYTES)], is_tiled=True)
    batcher.flash_attention = flash_attention
    return batcher


def _plan(batcher: SpanBatcher, num_queries: dict[str, int], seq_lens: list[int]):
    starts = ints([0, *num_queries.values()]).cumsum(0).int()
    table = torch.zeros(len(num_queries), 20, dtype=torch.int32)
    lens = ints(seq_lens)
    (plan,) = batcher.batch(StepBatch(list(num_queries), starts, lens, table, lens))
    return plan


def test_the_last_requests_are_taken_out_of_the_tiles(batcher):
    """In each step anew: the next part of a prompt has the same number of queries."""
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7), (40, 3))}, [])
    for done in (0, 30):
        plan = _plan(batcher, {"a": 1, "b": 30}, [81 + done, 128 + 30 + done])
        assert plan.prefills.first_request == 1
        (one,) = plan.prefills.rounds
        assert (one.first_query, one.end_query, one.num_copies) == (1, 31, 60)
        assert one.own.num_tokens.tolist() == [30 + done]
        tiled = torch.cat([of_size.query.flatten() for of_size in plan.tiles.classes])
        assert set(tiled.tolist()) == {-1, 0}
    plan = _plan(batcher, {"a": 1, "b": 1}, [112, 190])
    assert plan.prefills is None and {0, 1} <= set(plan.tiles.classes[0].query.flatten().tolist())


def test_requests_in_front_of_a_short_one_stay_tiles(batcher):
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    plan = _plan(batcher, {"b": 30, "a": 1}, [110, 81])
    assert plan.prefills is None and len(plan.tiles.classes) >= 1


def test_without_it_all_are_tiles(batcher):
    """From one step to the next, too, whose queries are as many."""
    batcher.update({"b": reader((80, 7))}, [])
    assert not _plan(batcher, {"b": 30}, [110]).tiles.classes
    batcher.flash_attention = None
    plan = _plan(batcher, {"b": 30}, [140])
    assert plan.prefills is None
    tiled = torch.cat([of_size.query.flatten() for of_size in plan.tiles.classes])
    assert set(range(30)) <= set(tiled.tolist())
