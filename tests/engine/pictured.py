# SPDX-License-Identifier: Apache-2.0
"""Choreographies with pictures, and the oracle that sees them by HuggingFace's own processor."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.engine.choreographies import LOGPROB_TOLERANCE, Draw, PlannedCall, draw_choreography
from tests.engine.oracle import Oracle
from vllm_choreo import Choreography
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.laws import difference, greedy
from vllm_choreo.testing.models.pictured import IMAGE

OPTIONS: dict[str, Any] = {"language_model_only": False, "limit_mm_per_prompt": {"image": 40}}
DRAW = Draw(max_length=40)
# Width and height; their longer side is scaled to that of two tiles.
_SIZES = ((112, 112), (112, 56), (56, 112), (30, 40))


def picture(seed: int, size: tuple[int, int] = (112, 112)) -> Image.Image:
    """A picture of random colours."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


class PictureOracle(Oracle):
    """Oracle of a model that takes pictures.

    Args:
        model_path: folder of the model, with its processor.
    """

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.processor = transformers.AutoProcessor.from_pretrained(model_path)
        tokenizer = self.processor.tokenizer
        self.placeholder = tokenizer.convert_tokens_to_ids(IMAGE)
        for module in self.model.modules():
            # HuggingFace stretches PaddleOCR's table of patches to the corners of a grid, vLLM's
            # does not: up to 0.2 in log-probability, on ordinary requests too. vLLM's is the
            # subject.
            if hasattr(module, "interpolation_align_corners"):
                module.interpolation_align_corners = False
        # Then a picture takes fewer positions than tokens (M-RoPE).
        self.has_rows = "mrope_section" in self.model.config.get_text_config().rope_parameters

    def prompt(
        self, token_ids: Sequence[int], pictures: Sequence[Any] = ()
    ) -> tuple[tuple[int, ...], Mapping[str, torch.Tensor]]:
        if not pictures:
            return tuple(token_ids), {}
        words = self.processor.tokenizer.convert_ids_to_tokens(list(token_ids))
        found = self.processor(text=" ".join(words), images=list(pictures), return_tensors="pt")
        ids = tuple(found.pop("input_ids")[0].tolist())
        for name in ("attention_mask", "mm_token_type_ids"):
            found.pop(name, None)
        return ids, dict(found)

    def num_positions(self, token_ids: Sequence[int], pictures: Sequence[Any] = ()) -> int:
        inputs = self.prompt([self.placeholder] * len(pictures), pictures)[1]
        return int(self._rows(token_ids, inputs).max()) + 1

    def _position_ids(
        self, token_ids: Sequence[int], positions: torch.Tensor, pictures: Mapping[str, Any]
    ) -> torch.Tensor:
        if "image_grid_thw" not in pictures:
            return super()._position_ids(token_ids, positions, pictures)
        return self._rows(token_ids, pictures)[:, None] + positions[0]

    def _rows(self, token_ids: Sequence[int], pictures: Mapping[str, Any]) -> torch.Tensor:
        """int64 `[3, n]`: positions of tokens from 0 on, by the definition of M-RoPE.

        A token of text is one behind all before it; those of a picture count frames, rows and
        columns of its grid from there.
        """
        grids = iter(pictures.get("image_grid_thw", torch.empty(0, 3)).tolist())
        rows: list[tuple[int, int, int]] = []
        following = 0
        while len(rows) < len(token_ids):
            if token_ids[len(rows)] == self.placeholder and "image_grid_thw" in pictures:
                frames, height, width = next(grids)
                sides = range(frames), range(height // 2), range(width // 2)
                rows += [tuple(following + i for i in at) for at in itertools.product(*sides)]
            else:
                rows.append((following,) * 3)
            following = max(map(max, rows)) + 1
        return torch.tensor(rows).T

    def plain_logits(
        self, token_ids: Sequence[int], pictures: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """As `Oracle.plain_logits`: where there are rows, by HuggingFace's own.

        It takes two pictures that touch for one: then by those of this oracle.
        """
        if not pictures or "image_grid_thw" not in pictures:
            return super().plain_logits(token_ids, pictures)
        kinds = torch.tensor([[int(token == self.placeholder) for token in token_ids]])
        num_runs = int(kinds[0, 0] + (kinds.diff() == 1).sum())
        if num_runs == len(pictures["image_grid_thw"]):
            return super().plain_logits(token_ids, {**pictures, "mm_token_type_ids": kinds})
        rows = self._rows(token_ids, pictures)[:, None]
        return super().plain_logits(token_ids, {**pictures, "position_ids": rows})

    def picture_inputs(self, pictures: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        return self.prompt([self.placeholder] * len(pictures), pictures)[1]


def check_picture_laws(llm: Any, oracle: PictureOracle) -> None:
    """A chain equals the text; so do exact mode, what was evicted, and a shift of everything.

    Raises:
        AssertionError: one of them does not hold.
    """
    words = ["t10 t11 t12 <image> t13", "t60 <image> <image> t61", "<image> t110 t111"]
    shown = [[picture(1)], [picture(2, (112, 56)), picture(1)], [picture(3)]]
    question: dict[str, Any] = {"header": "t7 t8 t9", "sampling_params": greedy()}
    prompt = " ".join([*words, question["header"]])
    data = {"image": [one for pictures in shown for one in pictures]}
    request = {"prompt": prompt, "multi_modal_data": data}
    (output,) = llm.generate(request, greedy(), use_tqdm=False)
    expected = output.outputs[0]
    with Choreography(llm) as c:
        chain: list[Message] = []
        for text, pictures in zip(words, shown, strict=True):
            chain.append(c.prefill(text, parents=chain, multi_modal_data={"image": pictures}))
        apart = c.prefill(
            [
                {"tokens": text, "multi_modal_data": {"image": pictures}}
                for text, pictures in zip(words, shown, strict=True)
            ]
        )
        offsets = [oracle.num_positions(m.token_ids, p) for m, p in zip(chain, shown, strict=True)]
        starts = [100 + sum(offsets[:number]) for number in range(4)]
        shifted = {"offsets": starts[:3], "new_offset": starts[3]}
        answers = [
            c.decode(parents=chain, **question),
            c.decode(parents=apart, mode="exact", **question),
            c.decode(parents=chain, **shifted, **question),
        ]
        c.evict(*chain)
        answers.append(c.decode(parents=chain, **question))
        for answer in answers:
            assert answer.usage.exact and difference(answer, expected) < LOGPROB_TOLERANCE


def with_pictures(
    choreography: list[list[PlannedCall]], seed: int, placeholder: int, has_parts: bool
) -> list[list[PlannedCall]]:
    """The choreography with up to two pictures in two of three calls, at random places.

    Args:
        has_parts: whether calls may name parts of messages.
    """
    rng = random.Random(seed)

    def pictured(call: PlannedCall) -> PlannedCall:
        tokens, pictures = list(call.tokens), []
        for _ in range(rng.choice((0, 1, 2))):
            tokens.insert(rng.randint(0, len(tokens)), placeholder)
            # Few, so that equal ones meet.
            pictures.append(picture(rng.randrange(4), rng.choice(_SIZES)))
        parents = call.parents
        if not has_parts:
            parents = tuple(replace(parent, part=None) for parent in parents)
        return replace(call, tokens=tuple(tokens), pictures=tuple(pictures), parents=parents)

    return [[pictured(call) for call in batch] for batch in choreography]


def draw_pictured(seed: int, placeholder: int, has_parts: bool = True) -> list[list[PlannedCall]]:
    """A random choreography with pictures."""
    return with_pictures(draw_choreography(seed, DRAW), seed, placeholder, has_parts)
