# SPDX-License-Identifier: Apache-2.0
"""Repair by layers, by its definition: the dense oracle entered at a layer, without project code.

A message's *hidden states* at a layer are what that layer is given when the message is encoded,
float32 `[num_tokens, hidden_size]`. A call with `layers=(lo, hi)` reads, in the layers from lo to
hi - 1, keys and values of its parents that come of those hidden states in the call's own context
and by the call's own model; in all other layers the stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tests.engine.oracle import Encoded, Oracle, Parent

Hidden = tuple[torch.Tensor, ...]


class LayerOracle:
    """Encodes messages with their hidden states, and reads them by layers.

    Args:
        others: of a variant of the model, whose messages this one reads, too, and the other way.

    Attributes:
        oracle: that computes.
        hidden: of each message that was encoded here: what each layer was given.
    """

    def __init__(self, oracle: Oracle, others: LayerOracle | None = None) -> None:
        self.oracle = oracle
        self.hidden: dict[int, Hidden] = others.hidden if others else {}
        self._kept: list[Encoded] = []  # or an id would be given again
        assert len(oracle.layers) == oracle.num_layers

    def encode(
        self, token_ids: Sequence[int], parents: Sequence[Parent] = (), new_offset: int = 0
    ) -> Encoded:
        """As `Oracle.encode`, and keeps the hidden states."""
        found: list[torch.Tensor] = []
        with self._at(range(self.oracle.num_layers), lambda given: found.append(given.clone())):
            message = self.oracle.encode(token_ids, parents, new_offset)
        self.hidden[id(message)] = tuple(found)
        self._kept.append(message)
        return message

    def repair(self, parents: Sequence[Parent], layers: Sequence[range]) -> list[Parent]:
        """What a call reads that repairs its parents in some ranges of layers."""
        chain: list[Parent] = []
        for parent in parents:
            part = slice(parent.start, parent.stop)
            message, tokens = parent.message, parent.message.token_ids[part]
            for group in layers:
                given = self.hidden[id(parent.message)][group.start][part]
                with self._at([group.start], lambda _, given=given: given):
                    anew = self.oracle.encode(tokens, chain, parent.offset)
                message = self._merged(message, parent.start, anew, group)
            chain.append(Parent(message, parent.offset, parent.start, parent.stop))
        return chain

    def _merged(self, message: Encoded, start: int, anew: Encoded, layers: range) -> Encoded:
        """`message`, with keys and values of `anew` from token `start` on in some layers."""
        full = self.oracle._overwritten(message, start, anew)
        keys, values = (
            tuple(new if layer in layers else old for layer, (old, new) in enumerate(pairs))
            for pairs in (
                zip(message.keys, full.keys, strict=True),
                zip(message.values, full.values, strict=True),
            )
        )
        return replace(message, keys=keys, values=values)

    @contextmanager
    def _at(self, layers: Sequence[int], act: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        """Have `act` see what the layers are given; a tensor that it returns takes its place."""

        def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            other = act(args[0][0])
            return (other[None], *args[1:]) if isinstance(other, torch.Tensor) else None

        handles = [self.oracle.layers[layer].register_forward_pre_hook(hook) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
