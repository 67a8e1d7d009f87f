# SPDX-License-Identifier: Apache-2.0
"""Laws of choreography, measured on an engine of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine.options import options


def rows(job: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the laws: in float32 all of them, in 16 bits the distance to HuggingFace.

    Args:
        job: model, runner, dtype, settings of the plugin; whether there are stand-ins.
    """
    from vllm import LLM

    from tools.gpu_dry_run.answers import differences
    from vllm_choreo.testing.laws import LAWS
    from vllm_choreo.testing.models.tiny import TINY_MODELS, make_tiny_model

    model, dtype = job["model"], job["dtype"]
    config = TINY_MODELS[model].config()
    if model.startswith("deepseek"):
        config.first_k_dense_replace = config.num_hidden_layers
        if job["stand_ins"]:
            from benchmarks.gpu.engine import stand_ins

            stand_ins.install_mla()
    path = make_tiny_model(model, folder, config=config)
    llm = LLM(
        str(path),
        dtype=dtype,
        max_model_len=2048,
        block_size=32,
        num_gpu_blocks_override=728,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.07,
        disable_log_stats=True,
        language_model_only=True,
        additional_config={"choreo": job["settings"]},
        **({} if dtype == "float32" else {"attention_backend": "TRITON_ATTN"}),
        **options("none", max_num_seqs=16),
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = worker.model_runner
    runner.batcher.min_saved_bytes = 0  # tiny models read together, too
    names = [*LAWS, "oracle"] if dtype == "float32" else []
    names += ["kept"] if job["settings"].get("hidden_memory_gib") else []
    case = {
        "model": f"{model}, full graphs" if job["settings"].get("full_cuda_graphs") else model,
        "runner": job["runner"].upper(),
        "dtype": dtype,
        "attention": "/".join(sorted({type(x.impl).__name__ for x in runner.layers.values()})),
    }
    for law, difference, allowed in differences(llm, str(path), names):
        found = {"law": law, "difference": difference, "allowed": allowed}
        yield {**case, **found, "holds": difference <= allowed}
