# SPDX-License-Identifier: Apache-2.0
"""Pictures of a call -> their addresses in its JSON: those of the web as they are, others whole."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.pictures import PARAMETER, pictures_in

if TYPE_CHECKING:
    from PIL import Image

_SCHEMES = ("data:", "https://", "http://", "file://")


def pictures_json(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Addresses of the pictures of `multi_modal_data`.

    Raises:
        ChoreoError: it has another form, or one is no picture that can be sent.
    """
    return {"image": [_address(picture) for picture in pictures_in(given)]}


def _address(picture: object) -> str:
    if isinstance(picture, str) and picture.startswith(_SCHEMES):
        return picture
    png = io.BytesIO()
    try:
        _image(picture).save(png, format="PNG")
    except OSError as error:  # a mode that PNG does not have
        raise ChoreoError(
            f'this picture cannot be sent as PNG ({error}): give picture.convert("RGB")',
            parameter=PARAMETER,
            value=getattr(picture, "mode", None),
        ) from error
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _image(picture: object) -> Image.Image:
    """PIL image of a picture."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ChoreoError(
            "PIL sends pictures: pip install pillow, or give addresses (data:, https:)",
            parameter=PARAMETER,
            value=type(picture).__name__,
        ) from error
    if isinstance(picture, Image.Image):
        return picture
    if type(picture).__name__ == "ndarray":
        try:
            return Image.fromarray(picture)  # type: ignore[arg-type]
        except TypeError as error:
            raise ChoreoError(
                f"this array is no picture ({error}): give one of shape (height, width, 3) and "
                "dtype uint8",
                parameter=PARAMETER,
                value=str(getattr(picture, "shape", None)),
            ) from error
    raise ChoreoError(
        "a picture is sent as a PIL image, a numpy array or an address (data:, https:)",
        parameter=PARAMETER,
        value=picture if isinstance(picture, str) else type(picture).__name__,
    )
