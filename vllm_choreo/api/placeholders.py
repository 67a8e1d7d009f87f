# SPDX-License-Identifier: Apache-2.0
"""Placeholders: the tokens that stand for pictures before vLLM puts these in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.pictures import PARAMETER

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Names under which configurations of models keep the token.
_NAMES = ("image_token_id", "image_token_index")


def placeholder_of(model_config: ModelConfig) -> int | None:
    """Token that stands for a picture; None: the model takes none, or it is not known."""
    config = getattr(model_config, "hf_config", None)
    return next((t for n in _NAMES if (t := getattr(config, n, None)) is not None), None)


def check_placeholders(
    token_ids: Sequence[int],
    num_pictures: int,
    placeholder: int | None,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Check that each picture has a placeholder, and each placeholder a picture.

    Args:
        decode: function that makes text of tokens.

    Raises:
        ChoreoError: there are more or fewer.
    """
    if placeholder is not None and (found := token_ids.count(placeholder)) != num_pictures:
        raise ChoreoError(
            "each picture needs a placeholder among the new tokens, and each placeholder a picture "
            f"({decode([placeholder])!r}, token {placeholder}); there are {found}",
            parameter=PARAMETER,
            value=f"{num_pictures} pictures",
        )
