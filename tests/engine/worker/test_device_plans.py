# SPDX-License-Identifier: Apache-2.0
"""Plans of batches whose tensors lie on a device, and what else lies there before they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.flash import flash_attention
from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.warmup import warm_up
from vllm_choreo.ops import LayerAttention, Rotation
from vllm_choreo.ops.sharing import PARTIAL_BYTES

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
KIND = LayerKind(None, SHAPE, 512)
ROTATION = Rotation(torch.tensor([1.0], dtype=torch.float64), is_neox=True)


def _ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _two_readers() -> dict[str, RequestSpans]:
    return {
        name: RequestSpans((0,), (64,), (0,), (delta,), 64) for name, delta in (("a", 0), ("b", 7))
    }


def test_planning_reads_nothing_back_from_the_device() -> None:
    """Tensors on the device "meta" have no contents: reading one back would raise."""
    kinds = [LayerKind(ROTATION, SHAPE, 512), LayerKind(ROTATION, SHAPE, 512, group=1)]
    batcher = SpanBatcher(16, kinds, device="meta")
    sent = {
        "a": ([4, 5, 6, 7, 8], [1, 2, 3, 10, 11]),
        "b": ([4, 5, 6, 7, 9], [12, 13, 14, 15, 16]),
        "ordinary": ([7], [17]),
    }
    batcher.update(_two_readers(), [], sent)
    assert "ordinary" not in batcher._block_ids
    table, other = _ints([[0] * 8] * 3, "meta"), _ints([[0] * 8] * 3, "meta")
    for own in (1, 2):
        lens = [64 + own, 65 + own, 9 + own]
        step = StepBatch(
            ["a", "b", "ordinary"],
            _ints([0, 1, 2, 3]),
            _ints(lens),
            table,
            _ints(lens, "meta"),
            {1: other},
        )
        plans = batcher.batch(step)
        assert plans is not None and plans[0].reads is not None
        batch = plans[0]
        assert batch.reads.groups()[-1].members == (0, 1), "planned from what the scheduler sent"
        assert batch.spans.num_tokens.tolist() == [64, own, 64, 1 + own, 9 + own]
        assert batch.spans.block_table is table and plans[1].spans.block_table is other
        groups = plans[1].reads.groups() if plans[1].reads is not None else []
        assert (0, 1) not in [group.members for group in groups], "they read other blocks there"
        assert batch.cos_sin.device.type == "meta"
    batcher.update({}, ["a", "b"])
    assert not batcher._block_ids and not batcher.reads_spans(["a", "b"])


def test_partial_results_have_their_memory_before_the_profile() -> None:
    """What vLLM measures the rest of must hold it: the KV cache takes all that is left."""

    class Profiled:
        device = torch.device("meta")

        def profile_run(self) -> None:
            assert self._workspace is not None  # type: ignore[attr-defined]
            self.profiled = self._workspace  # type: ignore[attr-defined]

    class Runner(ChoreoModelRunner, Profiled):
        pass

    runner: Any = Runner()
    runner.profile_run()
    assert runner.profiled.nbytes == PARTIAL_BYTES
    runner.profile_run()
    assert runner.profiled is runner._workspace, "allocated once"
    batcher = SpanBatcher(16, [KIND], workspace=runner._workspace)
    batcher.update(_two_readers(), [])
    table, lens = _ints([[4, 5, 6, 7, 8], [4, 5, 6, 7, 9]]), _ints([65, 65])
    plans = batcher.batch(StepBatch(["a", "b"], _ints([0, 1, 2]), lens, table))
    assert plans is not None and plans[0].workspace is runner._workspace


def test_tiles_are_kept_until_queries_or_work_change() -> None:
    pytest.importorskip("triton")
    batcher = SpanBatcher(16, [KIND], is_tiled=True)
    batcher.update(_two_readers(), [])
    table = _ints([[4, 5, 6, 7, *range(10, 110)], [4, 5, 6, 7, *range(110, 210)]])

    def tiles(own: int, start: Any = (0, 1, 2), exact: int | None = None) -> Any:
        lens = _ints([64 + own] * 2)
        device_lens = lens if exact is None else _ints([64 + exact] * 2)
        plans = batcher.batch(StepBatch(["a", "b"], _ints(start), lens, table, device_lens))
        assert plans is not None
        return plans[0].tiles

    first = tiles(1)
    assert first.own_tokens.tolist() == [1, 1]
    kept = tiles(500, exact=499)  # the host may know an upper bound only
    assert kept.classes is first.classes and kept.own_tokens.tolist() == [499, 499]
    grown = tiles(600)
    assert grown.classes is not first.classes
    assert tiles(601).classes is grown.classes
    prefill = tiles(610, (0, 8, 9))
    assert prefill.classes is not grown.classes
    batcher.shared_reading = False
    assert tiles(611, (0, 8, 9)).classes is not prefill.classes


@pytest.mark.parametrize("value_size", [None, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (32, 4), (64, 1)])
def test_warm_up_meets_tiles_of_every_size(
    heads: int, kv_heads: int, value_size: int | None
) -> None:
    pytest.importorskip("triton")
    shape = LayerShape(heads, kv_heads, 64, torch.bfloat16)
    batcher = SpanBatcher(16, [LayerKind(None, shape, 256 * kv_heads)], is_tiled=True)
    seen: list[Any] = []

    def attend(query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        (plan,) = batcher.running
        seen.append(plan)
        assert query.shape == (plan.spans.query_start_loc[-1], heads, 64)
        assert output.shape == (*query.shape[:2], value_size or 64) and output.is_contiguous()

    impl = SimpleNamespace(
        plan_index=0,
        attention=LayerAttention(1.0),
        attend=attend,
        value_size=value_size,
        kv_cache_of=lambda layer: layer.kv_cache,
    )
    layer = SimpleNamespace(impl=impl, kv_cache=None)
    warm_up([layer, layer], batcher, table_width=16)
    (plan,) = seen  # of two layers alike, one is enough
    tiles = plan.tiles
    group = heads // kv_heads
    assert {c.num_rows for c in tiles.classes} >= ({16, 64, 128} if group <= 16 else {64, 128})
    assert tiles.num_partials > 0
    assert batcher.running is None and not batcher.reads_spans(["0", "1", "2"])
    assert seen[0].prefills is None
    batcher.flash_attention = flash_attention
    for width, is_long_enough in ((16, False), (48, True)):
        warm_up([layer], batcher, table_width=width)
        assert (seen[-1].prefills is not None) == is_long_enough
        assert [c.num_rows for c in seen[-1].tiles.classes] == [c.num_rows for c in tiles.classes]
