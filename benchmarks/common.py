# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the engine, the machine in words, CSV files, tables."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RESULTS_PAGE = Path(__file__).parent / "RESULTS.md"

BLOCK_SIZE = 32


def set_environment(kv_cache_gib: int = 3) -> None:
    """Call before vLLM is imported: an engine in this process, quiet, free to use all cores."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    # Both sides of a comparison may use the same cores; the system places the threads.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)


def start_engine(block_size: int | None = BLOCK_SIZE, **options: Any) -> Any:
    """The embedded model, float32, in this process.

    Args:
        block_size: of the KV cache, in tokens; None leaves the choice to vLLM (or the plugin).
        options: of `vllm.LLM`, on top of or instead of the ones below.
    """
    from vllm_choreo.smallmodel.embedded import embedded_model

    model = str(embedded_model())
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if block_size is not None:
        defaults["block_size"] = block_size
    return LLM(model, **{**defaults, **options})


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def set_shared_reading(llm: Any, is_shared: bool) -> None:
    """Let calls that read the same message read it together, or each by itself."""
    planner = runner_of(llm).planner
    if not hasattr(planner, "shared_reading"):
        raise RuntimeError("this engine has no grouped reading to turn on or off")
    planner.shared_reading = is_shared


def kv_block_bytes(llm: Any) -> int:
    """Bytes of one KV block in all layers."""
    groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
    return sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups)


def only_token(llm: Any) -> int:
    """The one token that `forced` allows."""
    token: int = llm.get_tokenizer().encode(" and", add_special_tokens=False)[0]
    return token


def forced(llm: Any, num_tokens: int, **options: Any) -> Any:
    """Sampling parameters by which every answer is the same token, `num_tokens` times."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        allowed_token_ids=[only_token(llm)],
        **options,
    )


def empty_caches(llm: Any) -> None:
    """Forget every cached prefix. Messages must be freed before: their blocks would stay."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied: some blocks are still in use")


# -- the record of a run -----------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers were measured on; names neither the host nor any folder."""
    import torch
    import vllm

    import vllm_choreo

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _isa(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "vllm_choreo": vllm_choreo.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    name = found.get("model name", platform.machine())
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"


def _isa() -> str:
    from vllm_choreo.ops import cpu

    return cpu.available_isas()[0] if cpu.unavailable_reason() is None else "none (slow path)"


def command_line(module: str) -> str:
    """How this run was started, for the record."""
    return " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]])


def write_csv(name: str, rows: Sequence[Mapping[str, Any]], **constant: Any) -> Path:
    """Write `results/<name>.csv`; `constant` values are repeated in every row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    full = [{**row, **constant} for row in rows]
    names = list(dict.fromkeys(key for row in full for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(full)
    return path


def read_csv(name: str) -> list[dict[str, str]]:
    """The rows of `results/<name>.csv`; none if it was never written."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- numbers into words ------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def spread(values: Iterable[float]) -> tuple[float, float]:
    """First and third quartile; the extremes where there are fewer than four values."""
    found = sorted(values)
    if len(found) < 4:
        return found[0], found[-1]
    first, _, third = statistics.quantiles(found, n=4)
    return first, third


def with_spread(values: Iterable[float], form: str = ".0f") -> str:
    """`median [first quartile, third quartile]`."""
    found = list(values)
    low, high = spread(found)
    return f"{median(found):{form}} [{low:{form}}, {high:{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine_line(rows: Sequence[Mapping[str, str]]) -> str:
    """The machine of a CSV file, and the command that wrote it."""
    row = rows[0]
    return (
        f"`{row['command']}`, {row['date']}. {row['cpu']}, {row['cores']} cores, "
        f"{row['threads']} threads, kernels {row['isa']}, Python {row['python']}, torch "
        f"{row['torch']}, vLLM {row['vllm']}, vllm-choreo {row['vllm_choreo']}."
    )


def run_child(arguments: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` with pipes to it, in the folder that holds `benchmarks`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parent.parent,
    )
