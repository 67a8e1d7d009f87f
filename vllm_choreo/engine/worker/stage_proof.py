# SPDX-License-Identifier: Apache-2.0
"""Proof that a model does in stages what it does at once: both are run when an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import set_forward_context
from vllm.transformers_utils.config import mrope_num_dims

from vllm_choreo.engine.worker.probe import QueryRecorder
from vllm_choreo.engine.worker.stages import LayerStages, no_stages_error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

# Relative to the largest entry: of a sum that one way rounds and the other does not, by dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
_NUM_TOKENS = 4


@torch.inference_mode()
def prove_stages(
    stages: LayerStages,
    vllm_config: VllmConfig,
    layer_names: Sequence[str],
    device: torch.device,
    before_run: Callable[[int, LoRARequest | None], None],
) -> None:
    """Run tokens through all layers, through one after the other, and from some layers on.

    Args:
        layer_names: names of the attention layers.
        before_run: called before the model is run, see `StageWriter`.

    Raises:
        UnsupportedModelError: a layer's queries differ.
    """
    vocab_size = vllm_config.model_config.get_vocab_size()
    token_ids = torch.arange(7, 7 + _NUM_TOKENS, dtype=torch.int32, device=device) % vocab_size
    positions = torch.arange(_NUM_TOKENS, device=device)
    if rows := mrope_num_dims(vllm_config.model_config.hf_config):
        positions = positions.expand(rows, -1)
    tolerance = _TOLERANCE[vllm_config.model_config.dtype]

    def recorded(run: Callable[[], None], eager: bool = True) -> QueryRecorder:
        recorder = QueryRecorder(_NUM_TOKENS)
        before_run(_NUM_TOKENS, None)
        metadata = dict.fromkeys(layer_names, recorder)
        with set_forward_context(
            metadata, vllm_config, num_tokens=_NUM_TOKENS, skip_compiled=eager
        ):
            run()
        return recorder

    def run_model() -> None:
        stages.model(input_ids=token_ids, positions=positions)

    whole = recorded(run_model)
    borders = range(1, stages.num_layers)
    captured: dict[int, torch.Tensor] = {}

    def capture(layer: int, hidden: torch.Tensor, _: torch.Tensor) -> None:
        captured[layer] = hidden.clone()

    with stages.capturing(borders, capture):
        _compare(whole, recorded(run_model, eager=False), len(layer_names), tolerance)
    if [*captured] != [*borders]:
        raise no_stages_error("a stage of it did not run")
    for first in {*borders[:1], *borders[-1:]}:
        layers = first, stages.num_layers

        def run_stage(layers: tuple[int, int] = layers) -> None:
            stages.run(layers, token_ids, positions, captured[layers[0]])

        _compare(whole, recorded(run_stage), stages.num_layers - first, tolerance)


def _compare(whole: QueryRecorder, part: QueryRecorder, num_layers: int, tolerance: float) -> None:
    """Compare the queries of a run in stages with those of the whole model.

    Raises:
        UnsupportedModelError: `part` has not the queries of `num_layers` layers of `whole`.
    """
    if len(part.queries) != num_layers:
        raise no_stages_error(f"{len(part.queries)} layers ran where {num_layers} should have")
    for name, queries in part.queries.items():
        expected = whole.queries[name]
        error = float((queries - expected).abs().max() / expected.abs().max())
        if not error <= tolerance:
            raise no_stages_error(f"layer {name} asks something else (relative error {error:.2g})")
