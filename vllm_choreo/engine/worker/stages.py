# SPDX-License-Identifier: Apache-2.0
"""Ranges of a model's layers, run as stages of vLLM's own pipeline parallelism.

A model of vLLM that can be spread over several devices runs its layers from `start_layer` to
`end_layer`, takes what the stage before it returned, and embeds or ends only if it is the first
stage or the last. Here one model plays all stages in turn: the two numbers are set, and the group
of pipeline ranks tells it which stage it is. So no layer's code is known here, none is copied.

What a layer is given (*hidden states*) is the sum of the tensors that one stage hands to the next:
a model that keeps the residual apart adds both before it does anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors

from vllm_choreo.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

_PASSED_ON = ({"hidden_states"}, {"hidden_states", "residual"})
# What is done with the hidden states of a layer: layer, tensor, positions of its rows.
Capture = Callable[[int, torch.Tensor, torch.Tensor], None]


class LayerStages:
    """Stages of a loaded model.

    Args:
        model: the model as vLLM runs it, without wrappers.
        num_layers: number of its layers.

    Raises:
        UnsupportedModelError: vLLM's code of the model has no stages.
    """

    def __init__(self, model: torch.nn.Module, num_layers: int) -> None:
        found = [
            module
            for module in model.modules()
            if (getattr(module, "start_layer", None), getattr(module, "end_layer", None))
            == (0, num_layers)
        ]
        if not found:
            raise no_stages_error(
                f"no module of {type(model).__name__} has a first and a last layer"
            )
        self.model = model
        self.num_layers = num_layers
        # A model of pictures and text may hold what holds the layers.
        self._inner: torch.nn.Module = found[-1]

    def run(
        self,
        layers: tuple[int, int],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        """Run tokens through layers `(first, stop)`; keeps nothing but keys and values.

        They are stored where the forward context says, which must skip compiled code.

        Args:
            token_ids: int32 `[num_tokens]`.
            positions: int64 `[num_tokens]`, or `[3, num_tokens]` with M-RoPE.
            hidden: hidden states for the first of the layers, `[num_tokens, hidden_size]`; None:
                that is layer 0, which is given the tokens.
        """
        states = None if hidden is None else self._states(hidden)
        first, stop = layers
        # Never the last stage: what comes after the layers is of no use.
        with self._playing(first, stop, is_last=False):
            self.model(input_ids=token_ids, positions=positions, intermediate_tensors=states)

    @contextmanager
    def capturing(self, layers: Sequence[int], capture: Capture) -> Iterator[None]:
        """Run the model, within the context, in stages whose borders are `layers`.

        `capture` gets the hidden states of these. The results are the same, bit for bit.
        """
        inner, model = self._inner, self.model
        run_all, run_model = inner.forward, model.forward

        def in_stages(
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: IntermediateTensors | None = None,
            *args: object,
            **kwargs: object,
        ) -> object:
            states: object = intermediate_tensors
            for first, stop in pairwise((0, *layers, self.num_layers)):
                is_last = stop == self.num_layers
                with self._playing(first, stop, is_last):
                    states = run_all(input_ids, positions, states, *args, **kwargs)
                if not is_last:
                    capture(stop, _sum(states), positions)
            return states

        def without_compiled(*args: object, **kwargs: object) -> object:
            # Compiled code runs all layers at once.
            get_forward_context().skip_compiled = True
            return run_model(*args, **kwargs)

        inner.forward = in_stages
        if model is not inner:
            model.forward = without_compiled
        try:
            yield
        finally:
            del inner.forward
            if model is not inner:
                del model.forward

    @contextmanager
    def _playing(self, first: int, stop: int, is_last: bool) -> Iterator[None]:
        """Make the model, within the context, the stage of layers `first … stop-1`."""
        inner, group = self._inner, parallel_state._PP
        inner.start_layer, inner.end_layer = first, stop
        parallel_state._PP = _Stage(group, first == 0, is_last)
        try:
            yield
        finally:
            parallel_state._PP = group
            inner.start_layer, inner.end_layer = 0, self.num_layers

    def _states(self, hidden: torch.Tensor) -> IntermediateTensors:
        """Tensors handed to a stage whose first layer is given `hidden`."""
        empty = self._inner.make_empty_intermediate_tensors(
            len(hidden), hidden.dtype, hidden.device
        )
        if set(empty.tensors) not in _PASSED_ON:
            raise no_stages_error(f"its stages hand on {sorted(empty.tensors)}")
        others = {name: torch.zeros_like(tensor) for name, tensor in empty.tensors.items()}
        return IntermediateTensors({**others, "hidden_states": hidden})


class _Stage:
    """Group of pipeline ranks, as one stage sees it."""

    def __init__(self, group: GroupCoordinator, is_first: bool, is_last: bool) -> None:
        self._group = group
        self.is_first_rank = is_first
        self.is_last_rank = is_last

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)


def no_stages_error(reason: str) -> UnsupportedModelError:
    """Error of an engine that is to keep hidden states of a model without stages."""
    return UnsupportedModelError(
        f"this model cannot be run by layers: {reason}; start the engine without "
        "additional_config.choreo.hidden_memory_gib",
        parameter="model",
        value="hidden_memory_gib",
    )


def _sum(states: object) -> torch.Tensor:
    if not isinstance(states, IntermediateTensors) or set(states.tensors) not in _PASSED_ON:
        raise no_stages_error("a stage returned something else than hidden states")
    first, *others = states.tensors.values()
    return first + others[0] if others else first
