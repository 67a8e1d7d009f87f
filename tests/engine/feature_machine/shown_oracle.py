# SPDX-License-Identifier: Apache-2.0
"""The dense oracle of models that take pictures, by the tokens that programs have for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engine.feature_machine.shown import NUM_PICTURES, SIZES, PictureTokens, Shown
from tests.engine.layer_oracle import LayerOracle
from tests.engine.pictured import PictureOracle, picture


class ShownOracle(PictureOracle):
    """Oracle that sees the pictures of programs by their own tokens.

    Attributes:
        shown: the pictures.
    """

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self._embedding = self.model.get_input_embeddings()
        self._rows_of_pictures = torch.empty(0, self._embedding.weight.shape[1])
        self.shown = Shown([self._seen(number) for number in range(NUM_PICTURES)], self.placeholder)
        self._embedding.forward = self._embedded

    @torch.no_grad()
    def _seen(self, number: int) -> PictureTokens:
        """A picture's tokens, whose embeddings are kept."""
        shown = picture(number, SIZES[number])
        ids, inputs = self.prompt([self.placeholder], [shown])
        given: list[torch.Tensor] = []
        with LayerOracle(self)._at([0], given.append):
            self.plain_logits(ids, inputs)
        first, tokens = len(self._rows_of_pictures), list[int]()
        is_own = [token == self.placeholder for token in ids]
        self._rows_of_pictures = torch.cat([self._rows_of_pictures, given[0][is_own]])
        for token, own in zip(ids, is_own, strict=True):
            first += own
            tokens.append(-first if own else token)
        num_positions, grid = None, None
        if "image_grid_thw" in inputs:
            grid = tuple(inputs["image_grid_thw"][0].tolist())
            num_positions = self.num_positions(ids, [shown])
        return PictureTokens(shown, tuple(tokens), num_positions, grid)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        words = torch.nn.functional.embedding(ids.clamp(min=0), self._embedding.weight)
        if not len(self._rows_of_pictures):
            return words
        rows = self._rows_of_pictures[(-1 - ids).clamp(min=0)]
        return torch.where((ids < 0)[..., None], rows, words)

    def _position_ids(
        self, token_ids: Sequence[int], positions: torch.Tensor, pictures: Mapping[str, Any]
    ) -> torch.Tensor:
        first = {max(p.own): p.grid for p in self.shown.pictures if p.grid is not None}
        if grids := [first[token] for token in token_ids if token in first]:
            shown = {"image_grid_thw": torch.tensor(grids)}
            return super()._position_ids(self.shown.as_engine(token_ids), positions, shown)
        return super()._position_ids(token_ids, positions, pictures)
