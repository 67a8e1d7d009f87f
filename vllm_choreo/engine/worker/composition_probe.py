# SPDX-License-Identifier: Apache-2.0
"""The composition probe, which proves that states can be composed, on the loaded model.

A text is run, and another one behind it: as a prompt, then one more token as a generated one is.
Then every layer runs the second text's inputs again, from a state whose convolution is the same
and whose memory is empty. What that leaves, composed with the first text's state, must be what the
layer had in context. Attention passes values through, as in the position probe: it is not the
subject here, and each layer is given the same inputs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import set_forward_context

from vllm_choreo.engine.worker.probe import record_run
from vllm_choreo.engine.worker.state_layers import StateLayers
from vllm_choreo.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Error of a composed state, relative to its greatest entry, by the dtype of the model.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 8e-3}
_FIRST, _SECOND = 1, 2  # states
# More than a chunk of any kernel, if a step may have so many.
_NUM_TOKENS = 70


@torch.inference_mode()
def probe_composition(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    layers: Sequence[str],
    device: torch.device,
    before_run: Callable[[int], None],
    states: StateLayers,
) -> dict[str, float]:
    """Prove that the states of every layer can be composed.

    Args:
        model: the loaded model; its attention layers run our backend.
        layers: names of its attention layers.
        before_run: called with the number of tokens before the model is run.
        states: its layers with states, of which two are used that nobody has yet.

    Returns:
        Largest error by layer, relative to the greatest entry of its state.

    Raises:
        UnsupportedModelError: the states of a layer change otherwise than was followed.
    """
    num_tokens = min(_NUM_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
    num_tokens = max(1, min(num_tokens, (vllm_config.model_config.max_model_len - 1) // 2))

    def run(state: int, start: int, token_ids: Sequence[int]) -> dict[str, object]:
        before_run(len(token_ids))
        metadata = states.text_metadata(state, start, len(token_ids))
        positions = range(start, start + len(token_ids))
        record_run(model, vllm_config, positions, layers, device, metadata, token_ids)
        return metadata

    for layer in states.composed:
        layer.begin(_FIRST, *layer.composed(None, ()))
    run(_FIRST, 0, range(3, 3 + num_tokens))
    for layer in states.composed:
        layer.begin(_SECOND, *layer.composed(_FIRST, ()))
    with ExitStack() as stack:
        recorded = [stack.enter_context(layer.recording()) for layer in states.composed]
        parts = [
            run(_SECOND, num_tokens, range(50, 50 + num_tokens)),
            run(_SECOND, 2 * num_tokens, [9]),
        ]
    found: dict[str, float] = {}
    for layer, runs in zip(states.composed, recorded, strict=True):
        in_context = layer.composed(_SECOND, ())
        inputs, memory = layer.composed(_FIRST, ())
        layer.begin(_SECOND, inputs, None if memory is None else torch.zeros_like(memory))
        for again, metadata, num_run in zip(runs, parts, (num_tokens, 1), strict=True):
            states.follow_text(_SECOND, num_run)
            with set_forward_context(metadata, vllm_config, num_tokens=num_run):
                again()
        composed = layer.composed(_FIRST, [(_SECOND, num_tokens + 1)])
        found[layer.name] = max(map(_error, composed, in_context))
    _refuse_wrong(found, _TOLERANCE[vllm_config.model_config.dtype])
    return found


def _error(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Largest difference, relative to the greatest entry; infinite if something is no number."""
    if found is None or expected is None:
        return 0.0
    difference = (found.float() - expected.float()).abs().max()
    relative = difference / expected.float().abs().max().clamp(min=1e-30)
    return float(relative.nan_to_num(nan=torch.inf))


def _refuse_wrong(errors: Mapping[str, float], limit: float) -> None:
    """Check that no error is beyond the limit, or raise UnsupportedModelError."""
    for name, error in errors.items():
        if error > limit:
            raise UnsupportedModelError(
                f"what a message does to the state of layer {name} is not what was found in its "
                f"context (relative error {error:.2g}, {limit:.2g} is allowed), so that states "
                "cannot be composed; start the engine without "
                "additional_config.choreo.composed_states, and read chains",
                parameter="model",
                value=name,
            )
