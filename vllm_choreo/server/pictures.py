# SPDX-License-Identifier: Apache-2.0
"""Pictures that clients send, loaded as vLLM loads them: from where its options permit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.multimodal.media import MediaWithBytes
from vllm.renderers.chat_utils import parse_chat_messages_async

from vllm_choreo.errors import ChoreoError, UnsupportedOptionError
from vllm_choreo.semantics.pictures import IMAGE, PARAMETER
from vllm_choreo.server.errors import as_choreo_error

if TYPE_CHECKING:
    from vllm.config import ModelConfig


async def load_pictures(urls: Sequence[str], model_config: ModelConfig) -> list[object]:
    """Load the pictures at these addresses.

    Raises:
        ChoreoError: there is none, or vLLM may not or will not load it.
    """
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    try:
        _, data, _ = await parse_chat_messages_async(
            [{"role": "user", "content": parts}],
            model_config,
            content_format="openai",
        )
    except Exception as error:
        # An address that cannot be read ends in errors of several libraries.
        reason = as_choreo_error(error) or error
        raise ChoreoError(
            f"vLLM does not load these pictures: {reason}",
            parameter=PARAMETER,
            value=f"{len(urls)} pictures",
        ) from error
    return pictures_in_data(data or {}, PARAMETER)


def pictures_in_data(data: Mapping[str, Any], parameter: str) -> list[object]:
    """Pictures of what vLLM has loaded of a request.

    Raises:
        UnsupportedOptionError: it has sound or videos, or names of pictures in place of them.
    """
    if other := [modality for modality in data if modality != IMAGE]:
        raise UnsupportedOptionError(
            "messages hold text and pictures: leave videos and sound out",
            parameter=parameter,
            value=other,
        )
    pictures = [_without_bytes(picture) for picture in data.get(IMAGE) or ()]
    if any(picture is None for picture in pictures):
        raise UnsupportedOptionError(
            "a picture that is sent by its uuid alone may be any: send the picture",
            parameter=parameter,
            value="uuid",
        )
    return pictures


def _without_bytes(picture: object) -> object:
    return picture.media if isinstance(picture, MediaWithBytes) else picture
