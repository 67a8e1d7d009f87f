# SPDX-License-Identifier: Apache-2.0
"""Run whole vLLM engines on a GPU: hold them to the laws, and time workflows. From a checkout:

    python -m benchmarks.gpu.engine laws           tiny models: runners, dtypes, MLA
    python -m benchmarks.gpu.engine workflows      a model shaped like Llama-3.1-8B, random weights
    python -m benchmarks.gpu.engine workflows --shape 1b --full-graphs     without them, then with
    python -m benchmarks.gpu.engine workflows --shape tiny      on a CPU, too: proves the logic

Each engine is a process. Both sides of a workflow take turns on one engine: choreographed, and as
text with vLLM's prefix cache. Answers have the same lengths, and tokens of their own. Engines take
vLLM's Triton attention, piecewise and full CUDA graphs, and no compiled model (vLLM breaks graphs
at attention). `--stand-ins`: for a vLLM that is no CUDA build, see `stand_ins.py`.

Writes results/gpu_engine*.csv, but on a CPU. Exit status 1: a law does not hold, or an engine
broke.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine.tables import TABLES
from benchmarks.gpu.engine.workflows import DEFAULT_SHAPE, SHAPES
from benchmarks.harness.record import command_line, machine, write_csv

# Model, runner, dtype, settings of the plugin.
LAWS: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    ("llama", "v2", "float32", {"hidden_memory_gib": 0.01}),
    ("llama", "v1", "float32", {"reposition": "in_place"}),
    ("llama", "v2", "bfloat16", {}),
    ("deepseek_v3", "v2", "float32", {}),
    ("llama", "v2", "float32", {"full_cuda_graphs": True}),
    ("deepseek_v3", "v2", "float32", {"full_cuda_graphs": True}),
)
_NO_GPU = "no GPU: proves the logic, measures nothing"
_ENVIRONMENT = {
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # piecewise graphs of a model that is not compiled
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",  # else products of float32 are rounded to 10 bits
}


def main() -> int:
    args = _arguments()
    if args.child is not None:
        return _child(json.loads(args.child))
    rows: list[dict[str, Any]] = []
    failures = 0
    for job in _jobs(args):
        ended = _run(job)
        rows += ended
        failures += not ended or any(row.get("holds") is False for row in ended)
    name = "gpu_engine_laws" if args.part == "laws" else "gpu_engine"
    print(TABLES[name].markdown(rows))
    if rows and rows[0]["cpu"] != _NO_GPU:
        write_csv(name, rows, command=command_line())
    return int(failures > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=("laws", "workflows"), default="laws")
    parser.add_argument("--shape", choices=[*SHAPES], default=DEFAULT_SHAPE)
    parser.add_argument("--answer-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3, help="of each workflow and side")
    parser.add_argument(
        "--full-graphs",
        action="store_true",
        help="time another engine, too, in which choreographed steps replay full CUDA graphs",
    )
    parser.add_argument("--stand-ins", action="store_true", help="for a vLLM of another build")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.full_graphs and args.child is None and not _has_gpu():
        parser.error("--full-graphs needs a GPU: leave it out")
    return args


def _jobs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    common = {"part": args.part, "stand_ins": args.stand_ins}
    if args.part == "laws":
        for model, runner, dtype, settings in LAWS:
            if settings.get("full_cuda_graphs") and not _has_gpu():
                print(f"no GPU: {model} with full CUDA graphs is left out")
                continue
            case = {"model": model, "runner": runner, "dtype": dtype, "settings": settings}
            yield {**common, **case}
    else:
        sizes = {"answer_tokens": args.answer_tokens, "repeats": args.repeats}
        for is_full in (False, True)[: 1 + args.full_graphs]:
            engine = {"shape": args.shape, "runner": "v2", "full_graphs": is_full}
            yield {**common, **sizes, **engine}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that another process finds; none if it broke."""
    command = [sys.executable, "-m", "benchmarks.gpu.engine", "--child", json.dumps(job)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"row"'):
                rows.append(json.loads(line)["row"])
                line = f"{rows[-1]}\n"
            print(line, end="", flush=True)
    return [] if process.returncode else rows


def _child(job: Mapping[str, Any]) -> int:
    """Print rows, and be an engine's process."""
    os.environ.update(_ENVIRONMENT)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(job["runner"] == "v2"))
    import torch
    import triton

    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if job["stand_ins"]:
        from benchmarks.gpu.engine import stand_ins

        stand_ins.install()
    import vllm_choreo

    vllm_choreo.register()
    from benchmarks.gpu.engine import laws, workflows

    device = torch.cuda.get_device_name() if is_cuda else _NO_GPU
    versions = {**machine(), "cpu": device, "triton": triton.__version__}
    with tempfile.TemporaryDirectory() as folder:
        rows = (laws if job["part"] == "laws" else workflows).rows(job, Path(folder))
        for row in rows:
            print(json.dumps({"row": {**row, **versions}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
