# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: who drafts for whom.

Drafts that are looked up in tokens (n-grams, suffixes) are as good for calls as for ordinary
requests. A drafter with layers encodes messages as the model does, and reads them by the same spans
(`worker/drafting.py`), where vLLM's runner lays out its batches in the way that is read there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

_LOOKED_UP = ("ngram", "suffix")
_WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp")


def has_layers(speculative: SpeculativeConfig | None) -> bool:
    """Return whether a drafter has layers, with keys and values of their own."""
    return speculative is not None and speculative.method in _WITH_LAYERS


def check_speculation(vllm_config: VllmConfig) -> None:
    """Check that the engine's drafter can work beside calls.

    Raises:
        UnsupportedOptionError: it cannot; says why.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in (*_LOOKED_UP, *_WITH_LAYERS):
        raise UnsupportedOptionError(
            f"beside calls {', '.join((*_LOOKED_UP, *_WITH_LAYERS))} can draft; choose one of "
            'them, or run vLLM without the plugin (VLLM_PLUGINS="")',
            parameter="speculative_config.method",
            value=speculative.method,
        )
    model = vllm_config.model_config
    if model.is_hybrid or (model.use_mla and has_layers(speculative)):
        kind = "states" if model.is_hybrid else "MLA, beside drafters with layers,"
        raise UnsupportedOptionError(
            f"models with {kind} do not speculate beside calls yet: leave it out, or run vLLM "
            'without the plugin (VLLM_PLUGINS="")',
            parameter="speculative_config.method",
            value=speculative.method,
        )
    if not has_layers(speculative):
        return
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if asynchronous and not vllm_config.use_v2_model_runner:
        raise UnsupportedOptionError(
            "with asynchronous scheduling vLLM's model runner V1 has a drafter with layers begin "
            "before it is known how much of a call was right: set async_scheduling=False "
            "(--no-async-scheduling), or VLLM_USE_V2_MODEL_RUNNER=1",
            parameter="async_scheduling",
            value=True,
        )
    if speculative.parallel_drafting:
        raise UnsupportedOptionError(
            "drafters that draft in parallel were not run beside calls: leave it out",
            parameter="speculative_config.parallel_drafting",
            value=True,
        )
