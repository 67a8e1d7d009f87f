# SPDX-License-Identifier: Apache-2.0
"""Engines on the device double: they start, probe, capture graphs, and run steps of every kind.

What runs is vLLM's GPU worker, its model runner, sampler and graph manager, and ours over them, on
tiny models with random weights. Answers are held to the laws of choreography and to HuggingFace
(`vllm_choreo.testing`); the double refuses what CUDA would, and tells who waited for it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu_dry_run.gpus import GPUS, Gpu

if TYPE_CHECKING:
    from vllm import LLM

    from tools.gpu_dry_run.device import DeviceDouble

CAPTURE_SIZES = [1, 2, 4]
# Of steps, by the largest mode of CUDA graphs that they may take.
_KINDS = {"FULL": "ordinary", "PIECEWISE": "choreographed", "NONE": "keeping hidden states"}
# The full graphs of choreographed steps.
PLANNED = "by full graphs of its own"
_OPTIONS: Mapping[str, Any] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 160,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "disable_log_stats": True,
    "language_model_only": True,
    "seed": 0,
    "kernel_config": {"enable_flashinfer_autotune": False},  # FlashInfer is a name here
}


@dataclass(frozen=True)
class Case:
    """An engine to be run.

    Attributes:
        why: what it is here for.
        gpu: name of the GPU that is pretended.
        model: name of a tiny model.
        runner: "v2", which is vLLM's default on GPUs, or "v1".
        backend: name of the attention backend that has to be chosen.
        options: engine options beside those of all.
        settings: `additional_config["choreo"]`.
        laws: names of the laws that answers are held to; none in 16 bits, see `answers.py`.
        num_multiprocessors: of the GPU; None: as many as it has. Graphs launch as many programs
            as these run at once, which takes the interpreter long.
    """

    why: str
    gpu: str
    model: str
    runner: str
    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    laws: tuple[str, ...] = ()
    num_multiprocessors: int | None = None

    @property
    def pretended(self) -> Gpu:
        """GPU that is pretended."""
        found, number = GPUS[self.gpu], self.num_multiprocessors
        return found if number is None else replace(found, num_multiprocessors=number)


CASES = {
    "float32": Case(
        *("float32, by vLLM's Triton attention", "h100", "llama", "v2", "TRITON_ATTN"),
        {"dtype": "float32"},
        {"hidden_memory_gib": 0.01},
        laws=("chain", "kept"),
    ),
    "flash-attention-3": Case(
        *("16 bits on Hopper", "h100", "llama", "v2", "FLASH_ATTN"), {"dtype": "bfloat16"}
    ),
    "flash-prefills": Case(
        *("long prefills by FlashAttention 3", "h100", "llama", "v2", "FLASH_ATTN"),
        {"dtype": "bfloat16"},
        {"flash_prefills": True},
    ),
    "full-graphs": Case(
        *("full graphs of choreographed decoding", "h100", "llama", "v2", "TRITON_ATTN"),
        {"dtype": "float32"},
        {"hidden_memory_gib": 0.01, "full_cuda_graphs": True},
        laws=("chain", "shift", "permutation", "isolation", "oracle", "kept"),
        num_multiprocessors=4,
    ),
}


@dataclass
class Report:
    """What was seen of an engine.

    Attributes:
        backends: attention backends of the layers.
        steps: how often each kind of step took which graphs.
        num_prefills: requests of steps that FlashAttention ran among choreographed ones.
        num_captures, num_replays: of CUDA graphs, or their pieces.
        syncs: waits for the device inside steps, by the line that waited.
        differences: largest difference of log-probabilities, by law.
        faults: what is wrong.
    """

    backends: list[str] = field(default_factory=list)
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_prefills: int = 0
    num_captures: int = 0
    num_replays: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    differences: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        steps = [f"{count} {kind} {graph}" for (kind, graph), count in sorted(self.steps.items())]
        differences = [f"{name} {found:.2g}" for name, found in self.differences.items()]
        return (
            f"{' and '.join(self.backends)}; steps by graph: {', '.join(steps)}\n"
            f"    {self.num_prefills} prefills by FlashAttention among choreographed requests; "
            f"{self.num_captures} pieces captured, {self.num_replays} replayed; "
            f"differences of log-probabilities: {', '.join(differences)}"
        )


def environment(name: str) -> dict[str, str]:
    """Variables that vLLM reads when it is imported, for an engine of `CASES`."""
    return {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(CASES[name].runner == "v2")),
        # Piecewise graphs of a model that is not compiled.
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
        "VLLM_GPU_SYNC_CHECK": "warn",
    }


def run(name: str, double: DeviceDouble) -> Report:
    """Start an engine of `CASES` on the GPU that this process pretends, and have it answer."""
    from tools.gpu_dry_run import streams

    case, report = CASES[name], Report()
    with tempfile.TemporaryDirectory() as folder, double:
        from vllm_choreo.ops import flash_prefills
        from vllm_choreo.testing.models.tiny import make_tiny_model

        # Tiny ones are long, too.
        flash_prefills.MIN_QUERIES = flash_prefills.MIN_SPAN_TOKENS = 24

        path = make_tiny_model(case.model, Path(folder))
        try:
            llm = start(path, case.options, case.settings, double)
            runner = runner_of(llm)
            found = {layer.attn_backend.get_name() for layer in runner.layers.values()}
            report.backends = sorted(found)
            runner.batcher.min_saved_bytes = 0  # tiny models read together, too
            watch(runner, report, double)
            report.num_captures = streams.CUDAGraph.num_captures
            _measure(llm, path, case, report)
        except Exception as error:  # of any kind: it is the finding
            report.faults.append(_in_short(error))
    report.num_replays = streams.CUDAGraph.num_replays
    report.syncs.update(f"{s.where}: {s.what}" for s in double.syncs if s.in_step)
    report.faults += _wrong(case, report)
    return report


def start(
    path: Path, options: Mapping[str, Any], settings: Mapping[str, Any], double: DeviceDouble
) -> LLM:
    """Start an engine on the double.

    Args:
        options, settings: see `Case`.
    """
    from vllm.utils import gpu_sync_debug

    import vllm_choreo
    from tools.gpu_dry_run.kernels import replace_in_torch

    gpu_sync_debug._install_copy_checkers = lambda: None  # the double looks at copies itself
    vllm_choreo.register()
    replace_in_torch(double)
    from vllm import LLM

    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": CAPTURE_SIZES,
    }
    return LLM(
        str(path),
        compilation_config=compilation,
        additional_config={"choreo": dict(settings)},
        **{**_OPTIONS, **options},
    )


def runner_of(llm: LLM) -> Any:
    """Model runner of an engine in this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner


def watch(runner: Any, report: Report, double: DeviceDouble) -> None:
    """Count the steps by kind and graph; from now on waits in them are noted."""
    from vllm.utils import gpu_sync_debug

    dispatch = runner.graphs.dispatch

    def dispatch_and_count(*args: Any, **kwargs: Any) -> Any:
        chosen = dispatch(*args, **kwargs)
        mode = chosen[0] if isinstance(chosen, tuple) else chosen.cg_mode
        if getattr(runner.graphs, "is_planned", False):
            report.steps["choreographed", PLANNED] += 1
        elif runner._in_step:
            kind = _KINDS[runner.graphs.max_mode.name]
            report.steps[kind, mode.name] += 1
        return chosen

    runner.graphs.dispatch = dispatch_and_count
    batch = runner.batcher.batch

    def batch_and_count(step: Any, always: bool = False) -> Any:
        found = batch(step, always)
        if found and (prefills := found[0].prefills):
            report.num_prefills += len(step.request_ids) - prefills.first_request
        return found

    runner.batcher.batch = batch_and_count
    double.is_in_step = lambda: (
        gpu_sync_debug._checking.get() is not None and not gpu_sync_debug._allow_depth.get()
    )


def _measure(llm: LLM, path: Path, case: Case, report: Report) -> None:
    """Hold the engine's answers to the laws."""
    from tools.gpu_dry_run.answers import differences

    for name, difference, allowed in differences(llm, str(path), case.laws):
        report.differences[name] = difference
        if not difference <= allowed:
            report.faults.append(f"{name}: differs by {difference:.3g}, allowed is {allowed:.3g}")


def _wrong(case: Case, report: Report) -> Iterator[str]:
    """What is wrong with how the steps ran."""
    if report.backends != [case.backend]:
        yield f"its layers have the backends {report.backends}, not {case.backend}"
    if not report.faults:
        modes = {kind: {mode for k, mode in report.steps if k == kind} for kind, _ in report.steps}
        expected = {"choreographed": {"PIECEWISE", "NONE"}, "ordinary": {"FULL", "NONE"}}
        if case.settings.get("hidden_memory_gib"):
            expected["keeping hidden states"] = {"NONE"}
        if case.settings.get("full_cuda_graphs"):
            # The rest has more tokens than a graph: what decodes takes one of its own.
            expected["choreographed"] = {PLANNED, "NONE"}
        for kind, wanted in expected.items():
            if not wanted <= modes.get(kind, set()):
                yield f"{kind} steps took the graphs {sorted(modes.get(kind, set()))}"
    if bool(report.num_prefills) != bool(case.settings.get("flash_prefills")):
        yield f"FlashAttention ran {report.num_prefills} prefills of choreographed steps"
    if ("choreographed", "FULL") in report.steps:
        yield "a choreographed step replayed vLLM's own attention"
    for where in report.syncs:
        yield f"the host waits in a step, {where}"


def _in_short(error: BaseException) -> str:
    """The error, with the line of vLLM's or ours where it was raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = next(
        (
            f"{f.filename.rpartition('site-packages/')[2]}:{f.lineno}"
            for f in reversed(frames)
            if "/vllm" in f.filename
        ),
        "elsewhere",
    )
    return f"{type(error).__name__}: {str(error)[:400]} ({where})"
