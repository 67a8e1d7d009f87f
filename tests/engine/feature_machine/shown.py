# SPDX-License-Identifier: Apache-2.0
"""Pictures that programs show, and what the engine is given for them. No torch, no vllm.

For the ledger and the oracle each token of a picture is one of its own: a number below 0, of a row
of embeddings that the model makes of the picture. So equal tokens are equal pictures, and a part of
one is encoded anew like a part of a text. For the engine all of them are the placeholder.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine.feature_machine.program import Call, Ordinary

# Width and height of the pictures, by number.
SIZES = ((112, 112), (112, 56), (56, 112), (30, 40))
NUM_PICTURES = len(SIZES)


def drawn(rng: random.Random, count: int) -> tuple[tuple[int, int], ...]:
    """Pictures among `count` tokens: none, as often as not, one, or two."""
    places = sorted(rng.randint(0, count) for _ in range(rng.choice((0, 0, 1, 2))))
    return tuple((place, rng.randrange(NUM_PICTURES)) for place in places)


@dataclass(frozen=True)
class PictureTokens:
    """
    Attributes:
        picture: what it shows.
        tokens: those of the model's words around it, and its own, below 0.
        num_positions: positions that its own take; None: one for each.
        grid: frames, rows and columns of patches; None: positions do not go by them.
    """

    picture: Any
    tokens: tuple[int, ...]
    num_positions: int | None = None
    grid: tuple[int, ...] | None = None

    @property
    def own(self) -> frozenset[int]:
        return frozenset(token for token in self.tokens if token < 0)


@dataclass
class Shown:
    """Pictures of the programs of an engine; by default of one that takes none.

    Attributes:
        pictures: by number.
        placeholder: token that stands for a picture, and for each token of one.
    """

    pictures: Sequence[PictureTokens] = ()
    placeholder: int = -1
    _prompts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def tokens_of(self, call: Call | Ordinary) -> tuple[int, ...]:
        """Own tokens of a call, those of its pictures among them."""
        return self._shown(call, [picture.tokens for picture in self.pictures])

    def as_engine(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """These tokens as the engine has them."""
        return tuple(self.placeholder if token < 0 else token for token in tokens)

    def num_positions(self, tokens: Sequence[int]) -> int:
        """Positions that tokens take, which cut no picture with rows of positions."""
        saved = {
            max(p.own): len(p.own) - p.num_positions
            for p in self.pictures
            if p.num_positions is not None
        }
        return len(tokens) - sum(saved.get(token, 0) for token in tokens)

    @property
    def has_pictures(self) -> bool:
        return bool(self.pictures)

    @property
    def has_rows(self) -> bool:
        """Whether pictures take fewer positions than tokens."""
        return any(picture.num_positions is not None for picture in self.pictures)

    def prompt(self, engine: Any, call: Call | Ordinary, tenant: str) -> Any:
        """The prompt of a call as vLLM's engine takes it, rendered as our front end does."""
        from vllm_choreo.api.outcomes import engine_prompt
        from vllm_choreo.api.pictures import content_id

        if not call.pictures:
            return engine_prompt(call.tokens)
        key = (tenant, call.text, call.pictures)
        if key not in self._prompts:
            places = [(self.placeholder,)] * len(self.pictures)
            shown = [self.pictures[number].picture for _, number in call.pictures]
            prompt = {
                "prompt_token_ids": list(self._shown(call, places)),
                "multi_modal_data": {"image": shown},
                "multi_modal_uuids": {"image": [content_id(tenant, p) for p in shown]},
            }
            (self._prompts[key],) = engine.renderer.render_cmpl([prompt], skip_mm_cache=True)
        return {**self._prompts[key]}

    def _shown(self, call: Call | Ordinary, tokens: Sequence[Sequence[int]]) -> tuple[int, ...]:
        text, found, at = call.tokens, list[int](), 0
        for place, number in call.pictures:
            found += [*text[at:place], *tokens[number]]
            at = max(at, min(place, len(text)))
        return (*found, *text[at:])


def has_pictures(tokens: Sequence[int] | None) -> bool:
    """Whether there are tokens of pictures among these."""
    return any(token < 0 for token in tokens or ())
