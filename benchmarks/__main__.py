# SPDX-License-Identifier: Apache-2.0
"""The short form of the benchmarks, then one page from their CSV files.

python -m benchmarks            about a quarter of an hour on 2 idle cores
python -m benchmarks ttft       some of them
python -m benchmarks --page     write RESULTS.md again from the CSV files
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks import (
    bench_memory,
    bench_mixed,
    bench_ordinary,
    bench_policies,
    bench_quality,
    bench_scaling,
    bench_server,
    bench_shared_reading,
    bench_sweep,
    bench_ttft,
    bench_workflows,
    soak,
)
from benchmarks.common import RESULTS, RESULTS_PAGE, read_csv, table

_ATTENTION = ("benchmarks.bench_span_attention", "--rounds", "7", "--csv")
# Each in a process of its own: engines leave global state behind.
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "workflows": (
        (
            "benchmarks.bench_workflows",
            "--questions",
            "1",
            "--answer-tokens",
            "48",
            "--stock",
            "stock, 32",
        ),
    ),
    "sweep": (("benchmarks.bench_sweep", "--sizes", "2", "8"),),
    "scaling": (("benchmarks.bench_scaling", "--tokens", "500", "2000", "4000"),),
    "policies": (("benchmarks.bench_policies",),),
    "mixed": (("benchmarks.bench_mixed",),),
    "server": (("benchmarks.bench_server",),),
    "soak": (("benchmarks.soak",),),
    "quality": (("benchmarks.bench_quality", "--limit", "16", "--questions", "2"),),
    "shared": (("benchmarks.bench_shared_reading", "--rounds", "5"),),
    "ttft": (("benchmarks.bench_ttft", "--reps", "1"),),
    "ordinary": (("benchmarks.bench_ordinary", "--turns", "3"),),
    "memory": (("benchmarks.bench_memory",),),
    "attention": tuple((*_ATTENTION, f"benchmarks/results/span_attention_{n}.csv") for n in (1, 2)),
}

# Only if they are named: workflows and scaling show the same in more breadth, the soak takes long.
_DEFAULT = [name for name in COMMANDS if name not in ("ttft", "memory", "soak")]

INTRODUCTION = """\
# Benchmarks

Written by `make bench` (`python -m benchmarks`) from the CSV files in `results/`; do not edit.
Model: SmolLM2-135M-Instruct, float32. Outputs are compared before anything is timed, the sides of
a comparison take turns, and a comparison of times is made twice (passes), unless its section names
the number of runs.
Under each table: the command that made its numbers, the date and the machine."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="name")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    missed = []
    if not args.page:
        RESULTS.mkdir(exist_ok=True)
        missed = [name for name in args.names or _DEFAULT if not _run(name)]
    write_page()
    print(f"Written: {RESULTS_PAGE.relative_to(RESULTS.parent.parent)}")
    if missed:
        print(f"Failed, or below the bar: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def _run(name: str) -> bool:
    """Run a benchmark; whether it met its bar."""
    passed = True
    for command in COMMANDS[name]:
        began = time.perf_counter()
        print(f"== python -m {' '.join(command)}", flush=True)
        status = subprocess.run([sys.executable, "-m", *command], cwd=RESULTS.parent.parent)
        print(f"== status {status.returncode}, {time.perf_counter() - began:.0f} s", flush=True)
        passed &= status.returncode == 0
    return passed


def write_page() -> None:
    """RESULTS.md, from whatever CSV files are there."""
    sections = [
        bench_workflows.section(),
        bench_sweep.section(),
        bench_ttft.section(),
        bench_scaling.section(),
        bench_shared_reading.section(),
        bench_policies.section(),
        bench_memory.section(),
        bench_ordinary.section(),
        bench_mixed.section(),
        bench_server.section(),
        soak.section(),
        bench_quality.section(),
        _attention_section(),
    ]
    RESULTS_PAGE.write_text("\n\n".join([INTRODUCTION, *filter(None, sections)]) + "\n")


def _attention_section() -> str:
    """The kernel's part; that benchmark needs no engine and writes one CSV file per pass."""
    passes = [rows for n in (1, 2) if (rows := read_csv(f"span_attention_{n}"))]
    if not passes:
        return ""
    lines = []
    for i, row in enumerate(passes[0]):
        cells = [_attention_cell(rows[i]) for rows in passes]
        times = [f"{float(row[side]) / 1e3:.2f}" for side in ("vllm_us", "ours_us")]
        lines.append((_shape(row), *times, *cells))
    head = ["shape", "vLLM, ms", "ours, ms", *(f"ratio, pass {i + 1}" for i in range(len(passes)))]
    row = passes[0][0]
    return "\n\n".join(
        [
            "## Attention kernel against vLLM's, one span",
            "Times of the first pass; ratio ours / vLLM's: median [quartiles], below 1 is faster. "
            "Query heads / KV heads x head size.",
            table(head, lines),
            "Cost model: decode is bound by reading keys and values, which both sides read once "
            "(expected ratio 1); prefill by multiply-adds of the two matrix products.",
            f"`python -m {' '.join(_ATTENTION)} FILE`. {row['cpus']} cores, {row['threads']} "
            f"threads, kernels {row['isa']}, torch {row['torch']}, vLLM {row['vllm']}.",
        ]
    )


def _shape(row: Mapping[str, str]) -> str:
    kind = "decode" if row["q_len"] == "1" else f"prefill {row['q_len']}"
    heads = f"{row['num_heads']}/{row['num_kv_heads']}x{row['head_size']}"
    return f"{kind}, {row['num_reqs']} requests, {row['kv_len']} tokens, {heads}"


def _attention_cell(row: Mapping[str, str]) -> str:
    values: Sequence[float] = [float(row[name]) for name in ("ratio", "ratio_q1", "ratio_q3")]
    return "{:.2f} [{:.2f}, {:.2f}]".format(*values)


if __name__ == "__main__":
    sys.exit(main())
