# SPDX-License-Identifier: Apache-2.0
"""Engines for benchmarks, in this process, and what is asked of them."""

from __future__ import annotations

import os
import warnings
from typing import Any

BLOCK_SIZE = 32
FORCED = "vllm_choreo.engine.worker.forced:ForcedTokens"


def set_environment(kv_cache_gib: int = 3) -> None:
    """Call before vLLM is imported: an engine in this process, quiet, free to use all cores."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    # Both sides of a comparison may use the same cores; the system places the threads.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)


def start_engine(
    block_size: int | None = BLOCK_SIZE, model: str | None = None, **options: Any
) -> Any:
    """A model, float32, in this process.

    Args:
        model: its folder; None: the embedded one.
        block_size: of the KV cache, in tokens; None leaves the choice to vLLM (or the plugin).
        options: of `vllm.LLM`, on top of or instead of the ones below.
    """
    from vllm_choreo.testing.models.embedded import model_folder

    model = model_folder(model)
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


def model_name(model: str | None) -> str:
    """The name under which results of a model stand; None: the embedded one."""
    from vllm_choreo.testing.models.embedded import model_folder
    from vllm_choreo.trained_adapter import ModelIdentity

    return ModelIdentity.of(model_folder(model)).name


def picture_name(name: str, model: str | None) -> str:
    """The name of a picture of one model's results: the embedded one's is the plain one."""
    return f"{name}_{model_name(model)}" if model else name


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def set_shared_reading(llm: Any, is_shared: bool) -> None:
    """Let calls that read the same message read it together, or each by itself."""
    batcher = runner_of(llm).batcher
    if not hasattr(batcher, "shared_reading"):
        raise RuntimeError("this engine has no grouped reading to turn on or off")
    batcher.shared_reading = is_shared


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


def start_choreo_engine(kv_cache_gib: int = 3, **options: Any) -> Any:
    """`start_engine` with the plugin, from a process in which vLLM was not imported yet."""
    set_environment(kv_cache_gib)
    import vllm_choreo

    vllm_choreo.register()
    return start_engine(**options)


def has_plugin(llm: Any) -> bool:
    """Whether an engine in this process schedules with the plugin."""
    return type(scheduler_of(llm)).__module__.startswith("vllm_choreo")


def draw_tokens(start: int, num_tokens: int) -> list[int]:
    """Tokens `start …` of an endless text that repeats none within 40,000."""
    return [1000 + i * 7919 % 40000 for i in range(start, start + num_tokens)]
