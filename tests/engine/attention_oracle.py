# SPDX-License-Identifier: Apache-2.0
"""Repair by the attention of a call's own tokens, by its definition: without project code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.engine.oracle import Oracle, Parent


class AttentionOracle:
    """Looks at what a call attends to, and repairs that.

    Args:
        oracle: that computes.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        names = ("self_attn", "self_attention")
        modules = oracle.layers.named_modules()
        self._modules = [module for name, module in modules if name.endswith(names)]
        assert len(self._modules) == oracle.num_layers

    def repair(
        self,
        header: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        share: float,
        block_size: int,
        num_unchanged: int,
    ) -> list[Parent]:
        """What a call reads that repairs the blocks of its parents that get most attention.

        Args:
            header: its own tokens, sampled ones not among them.
            num_unchanged: so many of the first parents are read as they were encoded.
        """
        received = self._received(header, parents, new_offset)
        blocks: list[tuple[float, int, tuple[int, int]]] = []
        for number, parent in [*enumerate(parents)][num_unchanged:]:
            tokens: dict[int, list[int]] = {}
            for token in range(parent.stop - parent.start):
                tokens.setdefault((parent.start + token) // block_size, []).append(token)
            for part in tokens.values():
                # One message that is read twice at one place: the first one counts.
                weight = round(float(received[number][part].mean()), 5)
                blocks.append((-weight, number, (part[0], part[-1] + 1)))
        budget = share * sum(stop - start for _, _, (start, stop) in blocks)
        runs: list[list[tuple[int, int]]] = [[] for _ in parents]
        for _, number, (start, stop) in sorted(blocks):
            if stop - start <= budget:
                budget -= stop - start
                runs[number].append((start, stop))
        return self.oracle.repair(parents, [sorted(of_parent) for of_parent in runs])

    def _received(
        self, header: Sequence[int], parents: Sequence[Parent], new_offset: int
    ) -> list[torch.Tensor]:
        """Of each parent, what each token gets in the middle layers, `[num_tokens]`."""
        num_layers, found = self.oracle.num_layers, []
        with self._weights(found):
            self.oracle.encode(header, parents, new_offset)
        layers = {num_layers * part // 10 for part in (4, 5, 6)}
        total = sum(found[layer] for layer in layers)
        sizes = [parent.stop - parent.start for parent in parents]
        assert isinstance(total, torch.Tensor)
        return list(total.split([*sizes, len(header)])[:-1])

    @contextmanager
    def _weights(self, found: list[torch.Tensor]) -> Iterator[None]:
        """Within, collect what the keys get in each layer, over heads and queries."""

        def hook(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            found.append(output[1][0].sum((0, 1)))

        handles = [module.register_forward_hook(hook) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
