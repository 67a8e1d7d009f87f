# SPDX-License-Identifier: Apache-2.0
"""Plans of full CUDA graphs: what is read at fixed addresses is what a fresh plan says."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.engine.worker.test_span_batcher import ROTATION, SIZE, ints, reader
from tests.grids import sampled
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.plan_room import PlanRoom
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.ops import LayerAttention, Rotation, SpanPlan, span_attention

# Results that nobody stores are nothing divided by nothing, of which the interpreter warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

_MOST, _WIDTH, _NUM_BLOCKS = 4, 24, 64
_TURNED = Rotation(torch.rand(8, dtype=torch.float64), is_neox=False)
_SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
# Of two rotations, none, and a window; in two KV cache groups.
_KINDS = [
    LayerKind(ROTATION, _SHAPE, 512),
    LayerKind(_TURNED, _SHAPE, 512),
    LayerKind(None, _SHAPE, 512),
    LayerKind(ROTATION, _SHAPE._replace(window=40), 512, group=1),
]
# Requests that are there in each step; they have one token more each time. Behind them, how many
# groups of layers get new plans: all, each time that the batch was another one.
_STEPS = [
    [("ab", 2), ("ab", 0), ("bcd", 2)],
    [("a", 2), ("ab", 2), ("ab", 0), ("abc", 2), ("bc", 2), ("bc", 0), ("abcd", 2), ("d", 2)],
]
_READERS = {
    "a": reader((80, 0), (5, 3)),
    "b": reader((80, 7)),
    "c": reader(),
    "d": reader((100, -5), (80, 11), (64, 0)),
}
_ROWS = {
    "a": [1, 2, 3, 4, 5, 6, 7, 8],
    "b": [1, 2, 3, 4, 5, 9, 10],
    "c": [11, 12],
    "d": [*range(13, 20), *range(1, 6), *range(20, 26)],
}


def _table(names: str, offset: int = 0) -> torch.Tensor:
    """Block tables as the runner has them: rows of requests, then those of nobody."""
    rows = [[block + offset for block in _ROWS[name]] for name in names]
    padded = [row + [0] * (_WIDTH - len(row)) for row in rows]
    return ints(padded + [[0] * _WIDTH] * (_MOST - len(padded)))


def _attend(plan: SpanPlan, kind: LayerKind, num_queries: int, impl: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = kind.shape
    query = torch.randn(_MOST, shape.num_heads, shape.head_size, generator=generator)
    cache = torch.randn(_NUM_BLOCKS, shape.num_kv_heads, SIZE, 64, generator=generator)
    is_neox = kind.rotation is None or kind.rotation.is_neox
    layer = LayerAttention(0.2, is_neox=is_neox, window=shape.window)
    output = torch.full((num_queries, shape.num_heads, shape.head_size), 7.0)
    span_attention(query[:num_queries], cache, output, plan, layer, impl)
    return output


@pytest.mark.parametrize("steps", sampled(_STEPS, 1), ids=["few", "many"])
def test_graphs_read_what_each_step_planned(
    steps: Sequence[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests start and end, read together or not, and grow; plans are filled in when they do."""
    batcher, fresh = (
        SpanBatcher(SIZE, _KINDS, is_tiled=tiled, workspace=torch.empty(2**22))
        for tiled in (True, False)
    )
    batcher.make_room(_MOST)
    num_filled = []
    fill = PlanRoom.fill

    def count(self: PlanRoom, *args: object) -> None:
        num_filled.append(0)
        fill(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PlanRoom, "fill", count)
    tables = {0: _table(""), 1: _table("")}
    captured = {n: batcher.room_plans(n, {g: t[:n] for g, t in tables.items()}) for n in (2, 4)}
    present: set[str] = set()
    lens = {name: spans.base for name, spans in _READERS.items()}
    for names, num_groups in steps:
        started = {name: _READERS[name] for name in names if name not in present}
        for one in (batcher, fresh):
            one.update(started, present - {*names})
        present = {*names}
        for name in names:
            lens[name] += 1
        assert batcher.fits_room(names)
        seq_lens = ints([lens[name] for name in names])
        tables[0].copy_(_table(names))
        tables[1].copy_(_table(names, offset=30))
        step = StepBatch(
            *(list(names), ints(range(len(names) + 1)), seq_lens, tables[0][: len(names)]),
            *(seq_lens, {g: table[: len(names)] for g, table in tables.items()}),
        )
        expected = fresh.batch(step, always=True)
        num_requests = 2 if len(names) <= 2 else 4
        num_filled.clear()
        batcher.batch(step._replace(graph_requests=num_requests), always=True)
        assert len(num_filled) == num_groups
        for index, kind in enumerate(_KINDS):
            found = _attend(captured[num_requests][index], kind, num_requests, "triton")
            wanted = _attend(expected[index], kind, len(names), "reference")
            torch.testing.assert_close(found[: len(names)], wanted, atol=2e-5, rtol=2e-5)
            assert (found[len(names) :] == 7.0).all()


def test_what_does_not_fit_takes_no_graph() -> None:
    batcher = SpanBatcher(SIZE, _KINDS, is_tiled=True)
    parents = [(16, 0)] * 300
    weighed = replace(_READERS["a"], weights=(0.5, 1.2))
    batcher.update({**_READERS, "long": reader(*parents), "weighed": weighed}, [])
    assert not batcher.fits_room(["a"]), "there are no graphs"
    batcher.make_room(_MOST)
    assert batcher.fits_room(["a", "b", "c", "d"]) and batcher.fits_room(["ordinary"])
    assert not batcher.fits_room(["a", "b", "c", "d", "ordinary"])
    assert not batcher.fits_room(["long"]) and not batcher.fits_room(["a", "weighed"])
