# SPDX-License-Identifier: Apache-2.0
"""Time span_attention (C++) against vLLM's CPU attention: same tokens, same cache, one span.

    python -m benchmarks.attention [--csv out.csv] [--rounds 15]

Outputs are compared before anything is timed; the two sides run in turn. The ratio is the median
over rounds of (ours / vLLM's); `best` compares the fastest rounds, which is what remains
meaningful while other programs run (there use --threads 1). Run it twice, on an idle machine.
With --kv-cache-dtype fp8_e4m3 or fp8_e5m2 both read a cache in 8 bits, vLLM on AVX-512 alone.
"""

import argparse
import csv
import os
import platform
import sys
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from benchmarks.attention.one_span import FORMATS, Shape, measure
from vllm_choreo.ops import cpu as choreo_cpu


def all_shapes(
    dtypes: list[torch.dtype], block_sizes: list[int], kv_cache_dtype: str
) -> list[Shape]:
    work: list[tuple[int, int, int, int | None]]
    work = [(n, 1, kv, None) for kv in (512, 4096) for n in (1, 8, 16)]
    work += [(1, q, q, None) for q in (64, 256, 1024)]
    work += [(1, 256, 4096, None)]
    # Of gpt-oss and of Gemma 3.
    work += [(n, q, 4096, window) for window in (128, 512) for n, q in ((8, 1), (1, 256))]
    heads = [(9, 3, 64), (32, 8, 128)]
    return [
        Shape(n, q, kv, *h, block, dtype, window, kv_cache_dtype=kv_cache_dtype)
        for dtype in dtypes
        for block in block_sizes
        for h in heads
        for n, q, kv, window in work
    ]


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "isa": choreo_cpu.available_isas()[0],
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bar", type=float, default=1.15, help="largest allowed median ratio")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[32])
    parser.add_argument("--kv-cache-dtype", choices=["auto", *FORMATS], default="auto")
    parser.add_argument("--match", default="", help="only shapes whose label contains this")
    parser.add_argument("--threads", type=int, help="torch's threads; all by default")
    parser.add_argument("--csv")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    current_platform.import_kernels()
    if (reason := choreo_cpu.unavailable_reason()) is not None:
        sys.exit(f"the C++ kernels are not built: {reason}")
    info = machine()
    print(info)
    rows = []
    dtypes = [getattr(torch, name) for name in args.dtypes]
    for s in all_shapes(dtypes, args.block_sizes, args.kv_cache_dtype):
        if args.match not in s.label():
            continue
        r = measure(s, args.rounds)
        rows.append({**vars(s), **r, **info})
        print(
            f"{s.label()} ours {r['ours_us']:9.1f} us  vllm {r['vllm_us']:9.1f} us  "
            f"ratio {r['ratio']:.2f} [{r['ratio_q1']:.2f}, {r['ratio_q3']:.2f}] "
            f"best {r['ratio_best']:.2f}"
            f"{'  ABOVE THE BAR' if r['ratio'] > args.bar else ''}",
            flush=True,
        )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return int(any(row["ratio"] > args.bar for row in rows))


if __name__ == "__main__":
    sys.exit(main())
