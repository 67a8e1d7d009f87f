# SPDX-License-Identifier: Apache-2.0
"""Time of the host in a choreographed decode step, on a machine without a GPU.

    python benchmarks/gpu/host.py [--against DIR] [--turns 5] [--requests 64] [--spans 32]

Kernels are compiled for an H100 and launched by Triton, but for its last call, into the driver,
which does nothing: so what is timed is all Python of a step, and no driver. DIR is another checkout
of this repository, which measures itself. Each turn starts a process per checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

NUM_LAYERS = 32
_BLOCK, _SPAN_TOKENS = 16, 100
_OWN_TOKENS = 40
_PROGRAMS = 4 * 132  # of small tiles, that an H100 runs at once


class _AbsentGPU:
    """Driver of Triton's that compiles, and whose kernels are launched into nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.utils = self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *given: object) -> tuple[object, object, int, int, int]:
        return object(), object(), 128, 0, 1024

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *args: None


def main() -> None:
    args = _arguments()
    if args.child:
        print(json.dumps(dict(_measure(args.requests, args.spans))))
        return
    here = Path(__file__).parents[2]
    sides = {"this checkout": here}
    if args.against is not None:
        sides["the other"] = args.against.resolve()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(args.turns):
        for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            found[side].append(_ask(sides[side], args))
    print(f"us, median of {args.turns} processes; {args.requests} requests of {args.spans} spans")
    for name in found["this checkout"][0]:
        columns = [
            f"{side} {median(row[name] for row in rows):.1f}"
            for side, rows in found.items()
            if name in rows[0]
        ]
        print(f"  {name}: {', '.join(columns)}")


def _ask(checkout: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(checkout / "benchmarks/gpu/host.py"), "--child"]
    command += ["--requests", str(args.requests), "--spans", str(args.spans)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="DIR")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--spans", type=int, default=32)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(num_requests: int, num_spans: int) -> Iterator[tuple[str, float]]:
    """Microseconds of each part of a step, in this process."""
    import torch
    import triton

    triton.runtime.driver.set_active(_AbsentGPU())
    from vllm_choreo.ops.triton import attention

    torch.set_num_threads(1)
    attention._PROGRAMS_ON_CPU = _PROGRAMS
    engine = _Engine(num_requests, num_spans)
    for _ in range(5):
        engine.step()
    yield "a decode step", _us(engine.step, 30)
    yield "of it planning", _us(engine.plan, 100)
    yield "of it a layer", _us(engine.run_layers, 30) / NUM_LAYERS
    engine.plan_for_graph()
    yield "a decode step by a full graph of its own", _us(engine.plan_for_graph, 100)

    def replace_one() -> None:
        engine.start(["0"])
        engine.plan()

    def replace_all() -> None:
        engine.start(engine.names)
        engine.plan()

    yield "planning where a request starts", _us(replace_one, 5)
    yield "planning where all start", _us(replace_all, 3)

    def replace_one_in_graph() -> None:
        engine.start(["0"])
        engine.plan_for_graph()

    yield "by a full graph, where a request starts", _us(replace_one_in_graph, 5)


def _us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call on its core, the lower quartile: others may use the machine."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return 1e6 * sorted(times)[len(times) // 4]


class _Engine:
    """As much of an engine as plans and launches: half of the spans are read by all requests."""

    def __init__(self, num_requests: int, num_spans: int) -> None:
        import torch

        from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
        from vllm_choreo.engine.worker.span_batcher import SpanBatcher
        from vllm_choreo.ops import LayerAttention, Layout, Rotation, span_attention
        from vllm_choreo.ops.sharing import PARTIAL_BYTES

        shape = LayerShape(32, 8, 128, torch.bfloat16)
        rotation = Rotation(torch.rand(64, dtype=torch.float64), is_neox=True)
        workspace = torch.empty(PARTIAL_BYTES // 4)
        kinds = [LayerKind(rotation, shape, 4096)]
        self.batcher = SpanBatcher(_BLOCK, kinds, is_tiled=True, workspace=workspace)
        self.names = [str(r) for r in range(num_requests)]
        self.batcher.make_room(num_requests)
        self.num_spans = num_spans
        self.rows = self._rows(num_requests, num_spans)
        self.table = torch.tensor(self.rows, dtype=torch.int32)
        self.lens = torch.full((num_requests,), self.base + _OWN_TOKENS, dtype=torch.int32)
        self.starts = torch.arange(num_requests + 1, dtype=torch.int32)
        # As vLLM has them: queries cut out of a product, a cache of each layer.
        product = torch.zeros(num_requests, (32 + 8 + 8) * 128, dtype=torch.bfloat16)
        self.query = product[:, : 32 * 128].view(num_requests, 32, 128)
        self.output = torch.empty(num_requests, 32, 128, dtype=torch.bfloat16)
        self.caches = [
            torch.zeros(8, _BLOCK, 8, 256, dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(NUM_LAYERS)
        ]
        self.layers = [LayerAttention(0.1, layout=Layout.SIDE_BY_SIDE) for _ in range(NUM_LAYERS)]
        self.attend = span_attention
        self.start(self.names)

    @property
    def base(self) -> int:
        """Slots of the parents of a request."""
        return self.num_spans * -(-_SPAN_TOKENS // _BLOCK) * _BLOCK

    def _rows(self, num_requests: int, num_spans: int) -> list[list[int]]:
        per_span = self.base // _BLOCK // self.num_spans
        num_shared = num_spans // 2 * per_span
        num_own = (num_spans - num_spans // 2) * per_span + 20
        return [
            [*range(num_shared), *range(num_shared + r * num_own, num_shared + (r + 1) * num_own)]
            for r in range(num_requests)
        ]

    def start(self, names: list[str]) -> None:
        from vllm_choreo.engine.step import RequestSpans

        padded = self.base // self.num_spans
        slots = tuple(j * padded for j in range(self.num_spans))
        sizes, stored = (_SPAN_TOKENS,) * self.num_spans, (7,) * self.num_spans
        spans = {}
        for name in names:
            deltas = tuple(7 - 100 * j - 3 * int(name) for j in range(self.num_spans))
            spans[name] = RequestSpans(slots, sizes, stored, deltas, self.base)
        ids = {name: (self.rows[int(name)],) for name in names}
        self.batcher.update(spans, names, ids)

    def plan(self) -> None:
        self.plans = self.batcher.batch(self._step())

    def plan_for_graph(self) -> None:
        """Do all that the host does for a step that replays a full graph, but replay it."""
        assert self.batcher.fits_room(self.names)
        self.batcher.batch(self._step()._replace(graph_requests=len(self.names)))

    def _step(self) -> Any:
        from vllm_choreo.engine.worker.span_batcher import StepBatch

        lens = self.lens.clone()
        return StepBatch(self.names, self.starts, lens, self.table, lens)

    def run_layers(self) -> None:
        assert self.plans is not None
        (plan,) = self.plans
        for cache, layer in zip(self.caches, self.layers, strict=True):
            self.attend(self.query, cache, self.output, plan, layer, "triton")

    def step(self) -> None:
        self.plan()
        self.run_layers()


if __name__ == "__main__":
    main()
