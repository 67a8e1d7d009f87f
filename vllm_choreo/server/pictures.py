# SPDX-License-Identifier: Apache-2.0
"""Pictures that clients send, loaded as vLLM loads them: from where its options permit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.renderers.chat_utils import parse_chat_messages_async

from vllm_choreo.api.pictures import pictures_in_data
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.pictures import PARAMETER
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
