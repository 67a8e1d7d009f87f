# SPDX-License-Identifier: Apache-2.0
"""The engine of `vllm-choreo run`: in this process, quiet, with the times that the page shows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError

MAX_NUM_SEQS = 16


def start_engine(model: str | None, max_model_len: int, forces_tokens: bool) -> Any:
    """Start a `vllm.LLM`.

    Args:
        model: folder or name; None: the small test model.
        max_model_len: the context, in tokens.
        forces_tokens: load what replays need.

    Raises:
        ChoreoError: vLLM does not start with this model.
    """
    from vllm_choreo.embedded import embedded_model

    folder = model or str(embedded_model())
    print("Starting vLLM …", flush=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm_choreo

    vllm_choreo.register()
    from vllm import LLM

    processors = ["vllm_choreo.engine.forced:ForcedTokens"] if forces_tokens else None
    try:
        return LLM(
            folder,
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            # Prompts are never cut into chunks: vLLM 0.32 on CPU ends the engine when a request
            # with a seed is (torch's CPU generator has no offset).
            max_num_batched_tokens=MAX_NUM_SEQS * max_model_len,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,  # or the engine does not say how long calls wait
            logits_processors=processors,
            use_tqdm_on_load=False,
            seed=0,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ChoreoError(f"vLLM does not start with {folder}: {reason}") from error


def warm_up(llm: Any, modes: Sequence[str]) -> None:
    """One short call in each mode: what is done once only shall not be timed."""
    from vllm import SamplingParams

    from vllm_choreo.choreography import Choreography

    for mode in modes:
        with Choreography(llm, mode=mode) as c:
            doc = c.prefill("A document of a few words.")
            c.decode("Hello", parents=[doc], sampling_params=SamplingParams(max_tokens=4))
