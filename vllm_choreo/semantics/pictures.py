# SPDX-License-Identifier: Apache-2.0
"""Form in which calls are given pictures: that of vLLM's prompts."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

# Name of the argument, for errors.
PARAMETER = "multi_modal_data"
IMAGE = "image"


def pictures_in(given: object) -> list[object]:
    """Pictures of `multi_modal_data`, in the form of vLLM's prompts.

    Raises:
        ChoreoError: it has another form, or something else than pictures.
    """
    if not isinstance(given, Mapping) or not given:
        raise ChoreoError(
            'pictures are given as vLLM takes them: {"image": picture}, or a list of pictures',
            parameter=PARAMETER,
            value=type(given).__name__,
        )
    if other := [key for key in given if key != IMAGE]:
        raise UnsupportedOptionError(
            'messages hold text and pictures, under the key "image": leave the others out',
            parameter=PARAMETER,
            value=other,
        )
    pictures = given[IMAGE]
    pictures = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if not pictures:
        raise ChoreoError(
            "an empty list has no picture: leave it out", parameter=PARAMETER, value=[]
        )
    return pictures
