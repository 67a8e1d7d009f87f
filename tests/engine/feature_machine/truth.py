# SPDX-License-Identifier: Apache-2.0
"""What calls should give: the dense oracle, by recipe. Each encoding is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tests.engine.attention_oracle import AttentionOracle
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Encoded, Oracle, Parent
from tests.engine.state_oracle import StateEncoded, StateOracle
from tests.engine.text_oracle import TextOracle
from tests.engine.weighed_oracle import WeighedOracle
from vllm_choreo.repair.runs import merge_ranges

TokenRanges = Sequence[Sequence[tuple[int, int]]]
# Between programs no more encodings are kept than so many; each takes some 200 KiB.
_MAX_KEPT = 500
# Attention of two blocks that are closer than this may be ranked the other way by a kernel that
# adds in another order.
_TIE = 1e-4


class Truth:
    """
    Args:
        oracles: that of the model, then those of the model with each adapter.
        block_size: by which repair by attention counts.
    """

    def __init__(self, oracles: Sequence[Oracle], block_size: int) -> None:
        self._oracles = oracles
        self._block_size = block_size
        first = LayerOracle(oracles[0])
        self._by_layers = [first, *(LayerOracle(oracle, first) for oracle in oracles[1:])]
        self._cache: dict[Any, Any] = {}
        self._numbers: dict[int, int] = {}  # of encodings, by identity

    def clear(self) -> None:
        """Between programs: forget, if there is much to forget."""
        if len(self._cache) <= _MAX_KEPT:
            return
        self._cache.clear()
        self._numbers.clear()
        for oracle in self._by_layers:
            oracle.hidden.clear()
            oracle._kept.clear()

    def encode(
        self,
        adapter: int,
        tokens: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        weights: Sequence[float] | None = None,
    ) -> Encoded:
        """A message that reads `parents` as they are."""
        key = (adapter, tuple(tokens), self._named(parents), new_offset, weights and (*weights,))
        if key not in self._cache:
            if weights is None:
                found = self._by_layers[adapter].encode(tokens, parents, new_offset)
            else:
                found = self._weighed(adapter, tokens, parents, new_offset, weights)
            self._keep(key, found)
        encoded: Encoded = self._cache[key]
        return encoded

    def exact(self, adapter: int, parents: Sequence[Parent]) -> list[Parent]:
        """The same tokens at the same places, encoded one behind the other."""
        return _encoded_anew(self, adapter, parents)

    def repaired(self, adapter: int, parents: Sequence[Parent], runs: TokenRanges) -> list[Parent]:
        """With runs of tokens encoded anew."""
        oracle = self._oracles[adapter]
        key = ("runs", adapter, self._named(parents), tuple(map(tuple, runs)))
        return self._read(key, lambda: oracle.repair(parents, runs))

    def by_layers(
        self, adapter: int, parents: Sequence[Parent], layers: Sequence[range]
    ) -> list[Parent]:
        """With all tokens encoded anew in ranges of layers."""
        oracle = self._by_layers[adapter]
        key = ("layers", adapter, self._named(parents), tuple(layers))
        return self._read(key, lambda: oracle.repair(parents, layers))

    def runs_by_attention(
        self,
        adapter: int,
        tokens: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        share: float,
        num_unchanged: int,
    ) -> list[list[tuple[int, int]]] | None:
        """The blocks to which the tokens attend most; None: two of them are too close to tell."""
        oracle = AttentionOracle(self._oracles[adapter])
        received = oracle._received(tokens, parents, new_offset)
        blocks: list[tuple[float, int, tuple[int, int]]] = []
        for number, parent in [*enumerate(parents)][num_unchanged:]:
            first = parent.start - parent.start % self._block_size
            for edge in range(first, parent.stop, self._block_size):
                start = max(edge, parent.start) - parent.start
                stop = min(edge + self._block_size, parent.stop) - parent.start
                weight = float(received[number][start:stop].mean())
                blocks.append((-weight, number, (start, stop)))
        blocks.sort()
        chosen = _chosen(blocks, share, len(parents))
        for index in range(len(blocks) - 1):
            one, other = blocks[index : index + 2]
            if abs(one[0] - other[0]) < _TIE:
                swapped = [*blocks[:index], other, one, *blocks[index + 2 :]]
                if _chosen(swapped, share, len(parents)) != chosen:
                    return None
        return chosen

    def rotated_keys(self, encoded: Encoded, layer: int, position: int) -> Any:
        """The keys of a message as an engine has them whose first one is rotated to `position`."""
        oracle, keys = self._oracles[0], encoded.keys[layer]
        if not oracle.layer_has_rope[layer]:
            return keys
        return oracle.as_stored(oracle.rotate(keys, position - encoded.position, layer))

    @property
    def num_layers(self) -> int:
        return self._oracles[0].num_layers

    def _weighed(
        self,
        adapter: int,
        tokens: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        weights: Sequence[float],
    ) -> Encoded:
        layers = self._by_layers[adapter]
        given: list[Any] = []
        with layers._at(range(self.num_layers), lambda hidden: given.append(hidden.clone())):
            weighed = WeighedOracle(self._oracles[adapter], *weights)
            encoded = weighed.encode(tokens, parents, new_offset)
        layers.hidden[id(encoded)] = tuple(given)
        layers._kept.append(encoded)
        return encoded

    def _read(self, key: Any, compute: Any) -> list[Parent]:
        if key not in self._cache:
            parents = compute()
            self._cache[key] = parents
            for number, parent in enumerate(parents):
                if id(parent.message) not in self._numbers:
                    self._keep((*key, number), parent.message)
        read: list[Parent] = self._cache[key]
        return read

    def _keep(self, key: Any, encoded: Encoded) -> None:
        self._cache[key] = encoded
        self._numbers[id(encoded)] = len(self._numbers)

    def _named(self, parents: Sequence[Parent]) -> tuple[tuple[int, int, int, int], ...]:
        numbers = self._numbers
        return tuple((numbers[id(p.message)], p.offset, p.start, p.stop) for p in parents)


@dataclass(frozen=True, eq=False)
class TextEncoded:
    """A message of a model with states: what it says behind the text of its parents."""

    token_ids: tuple[int, ...]
    rows: torch.Tensor

    def logprobs(self) -> torch.Tensor:
        """float32 `[n, vocab_size]`, as those of `Encoded`."""
        return self.rows


class StateTruth:
    """What calls give whose model keeps states, and reads messages in any order."""

    def __init__(self, oracle: StateOracle) -> None:
        self._oracle = oracle
        self.num_layers = oracle.num_layers

    def clear(self) -> None:
        """Between programs: there is nothing to forget."""

    def encode(
        self,
        adapter: int,
        tokens: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        weights: Sequence[float] | None = None,
    ) -> StateEncoded:
        """A message that reads `parents` as they are, in this order."""
        assert not adapter and weights is None
        return self._oracle.encode(tokens, parents, new_offset)

    def exact(self, adapter: int, parents: Sequence[Parent]) -> list[Parent]:
        """The same tokens at the same places, encoded one behind the other."""
        return _encoded_anew(self, adapter, parents)

    def repaired(self, adapter: int, parents: Sequence[Parent], runs: TokenRanges) -> list[Parent]:
        """With first tokens encoded anew; what they are of is read in two."""
        assert not adapter
        return self._oracle.repair(parents, runs)


class TextTruth:
    """What calls give whose model reads chains: that of their text, by a dense pass."""

    def __init__(self, oracle: TextOracle) -> None:
        self._oracle = oracle
        self.num_layers = oracle.num_layers

    def clear(self) -> None:
        """Between programs: there is nothing to forget."""

    def encode(
        self,
        adapter: int,
        tokens: Sequence[int],
        parents: Sequence[Parent],
        new_offset: int,
        weights: Sequence[float] | None = None,
    ) -> TextEncoded:
        """A message behind the text of `parents`; where the text begins makes no difference."""
        assert not adapter and weights is None
        text = [t for p in parents for t in p.message.token_ids[p.start : p.stop]]
        rows = self._oracle.logprobs([*text, *tokens])[len(text) :]
        return TextEncoded(tuple(tokens), rows)

    def exact(self, adapter: int, parents: Sequence[Parent]) -> list[Parent]:
        """The same tokens: of parents nothing else counts."""
        return list(parents)


AnyTruth: TypeAlias = Truth | TextTruth | StateTruth


def _encoded_anew(
    truth: Truth | StateTruth, adapter: int, parents: Sequence[Parent]
) -> list[Parent]:
    chain: list[Parent] = []
    for parent in parents:
        tokens = parent.message.token_ids[parent.start : parent.stop]
        encoded = truth.encode(adapter, tokens, chain, parent.offset)
        chain.append(Parent(encoded, parent.offset, 0, len(tokens)))
    return chain


def _chosen(
    blocks: Sequence[tuple[float, int, tuple[int, int]]], share: float, num_parents: int
) -> list[list[tuple[int, int]]]:
    budget = share * sum(stop - start for _, _, (start, stop) in blocks)
    runs: list[list[tuple[int, int]]] = [[] for _ in range(num_parents)]
    for _, number, (start, stop) in blocks:
        if stop - start <= budget:
            budget -= stop - start
            runs[number].append((start, stop))
    return [list(merge_ranges(of_parent)) for of_parent in runs]
