# SPDX-License-Identifier: Apache-2.0
"""Attention over latents (MLA), and over keys and values in 8 bits: one span, and shared messages.

    python -m benchmarks.attention.kinds [--rounds 9] [--passes 2] [--cpu-time]

One span is read by our operation and by vLLM's kernel in turn (`one_span.py` says what vLLM reads
where it has no kernel of 8 bits); shared messages are read together and each alone. Outputs are
compared before anything is timed. With `--cpu-time`, one thread's seconds of CPU are counted, which
other programs on the machine change less than the clock. Exit status 1: a shape is below the bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention.one_span import Shape, measure
from benchmarks.attention.shared_work import in_turn_row, make_work
from benchmarks.attention.shared_work import measure as measure_shared
from benchmarks.attention.tables import SPEED_BAR, TABLES
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text

FORMAT = "fp8_e4m3"
# Requests, queries of each, tokens that each sees.
_DECODES = [(n, 1, kv) for n in (1, 8, 16) for kv in (512, 4096)]
_PREFILLS = [(1, 256, 256), (1, 1024, 1024), (1, 256, 4096)]
_READERS = (2, 4, 8, 16, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="on one thread")
    args = parser.parse_args()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    clock = time.perf_counter
    if args.cpu_time:
        clock = time.process_time
        torch.set_num_threads(1)
    spans: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        for kind, shape in _shapes():
            spans.append({"pass": number, **_span_row(kind, shape, args.rounds, clock)})
            print(spans[-1], flush=True)
        for kind, readers, heads, options in _shared_shapes():
            work = make_work(readers, 4000, *heads, **options)
            seconds = measure_shared(work, args.rounds, clock)
            row = {"kind": kind, "heads": _heads(*heads), "readers": readers}
            shared.append({"pass": number, **row, **in_turn_row(seconds)})
            print(shared[-1], flush=True)
    write_csv("span_attention_kinds", spans, **record())
    write_csv("shared_reading_kinds", shared, **record())
    print(as_text(TABLES[name] for name in ("span_attention_kinds", "shared_reading_kinds")))
    return int(any(row["speed"] < SPEED_BAR for row in spans))


def _shapes() -> list[tuple[str, Shape]]:
    """Shapes of DeepSeek V2 Lite and V3, which vLLM's kernel decodes alone; of dense models."""
    f32 = torch.float32
    latents = [
        Shape(n, q, kv, heads, 1, 576, 16, f32, value_size=512)
        for heads in (16, 128)
        for n, q, kv in _DECODES
    ]
    dense = [
        Shape(n, q, kv, *heads, 32, f32, kv_cache_dtype=FORMAT)
        for heads in ((9, 3, 64), (32, 8, 128))
        for n, q, kv in _DECODES + _PREFILLS
    ]
    return [("MLA", shape) for shape in latents] + [("FP8", shape) for shape in dense]


def _shared_shapes() -> list[tuple[str, int, tuple[int, int, int], dict[str, Any]]]:
    e4m3 = {"fmt": torch.float8_e4m3fn}
    kinds: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
        ("MLA", (16, 1, 576), {"value_size": 512}),
        ("FP8", (9, 3, 64), e4m3),
        ("FP8", (32, 8, 128), e4m3),
    ]
    return [(kind, n, heads, options) for kind, heads, options in kinds for n in _READERS]


def _span_row(kind: str, shape: Shape, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    found = measure(shape, rounds, clock)
    return {
        "kind": kind,
        "heads": _heads(shape.num_heads, shape.num_kv_heads, shape.head_size),
        "requests": shape.num_reqs,
        "queries": shape.q_len,
        "tokens": shape.kv_len,
        "kv_cache_dtype": shape.kv_cache_dtype,
        "vllm_kv_cache_dtype": shape.vllm_kv_cache_dtype,
        "ours_us": round(found["ours_us"], 1),
        "vllm_us": round(found["vllm_us"], 1),
        "speed": round(1 / found["ratio"], 3),
        "speed_best": round(1 / found["ratio_best"], 3),
        "max_abs_difference": found["max_abs_difference"],
    }


def _heads(heads: int, kv_heads: int, size: int) -> str:
    return f"{heads}/{kv_heads}x{size}"


if __name__ == "__main__":
    sys.exit(main())
