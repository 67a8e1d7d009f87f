# SPDX-License-Identifier: Apache-2.0
"""Pictures that calls are given: vLLM's renderer makes a prompt of them, before a call is planned.

Its tokens are the message's from then on: each placeholder has become as many as the picture takes.
A picture is known by what it shows, and by its tenant: so nothing that vLLM keeps of one, in front
of the engine or in it, is ever found by another tenant. Its pixels always go to the engine: vLLM
leaves them out where it believes that the engine has them still, and a call that is refused after
its pictures were rendered, or waits for its parents, would make that wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm_choreo.api.picture_prompts import cut_prompt
from vllm_choreo.api.placeholders import check_placeholders, placeholder_of
from vllm_choreo.api.session import Session
from vllm_choreo.errors import ChoreoError, TooLongError, UnsupportedOptionError
from vllm_choreo.semantics.call import CallSpec, Tokenized
from vllm_choreo.semantics.pictures import IMAGE, PARAMETER, pictures_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs.engine import MultiModalInput
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor


class _Engine(Protocol):
    """Front of an engine: as much of vLLM's `LLMEngine` and `AsyncLLM` as pictures need."""

    renderer: BaseRenderer
    input_processor: InputProcessor
    vllm_config: VllmConfig


@dataclass(frozen=True)
class _Given:
    """Tokens of a call, with a placeholder for each of its pictures."""

    tenant: str
    token_ids: tuple[int, ...]
    pictures: list[object]

    def prompt(self) -> dict[str, Any]:
        """The prompt as vLLM's renderer takes it; takes time that grows with the pictures."""
        shown = named_pictures(self.tenant, {IMAGE: self.pictures}, PARAMETER)
        return {"prompt_token_ids": list(self.token_ids), **shown}


class PictureRenderer:
    """Renderer of the pictures in a session's calls.

    Args:
        session: the session that will plan the calls.
        engine: vLLM's `LLMEngine` or `AsyncLLM`.
    """

    def __init__(self, session: Session, engine: _Engine) -> None:
        self._session = session
        self._engine = engine

    def render(self, specs: Sequence[CallSpec]) -> list[CallSpec]:
        """Put the pictures of calls among their tokens.

        Raises:
            ChoreoError: the model takes none, there are more or fewer than placeholders, or one is
                too large or none; nothing was submitted.
        """
        return [self._rendered(spec) if _has_pictures(spec) else spec for spec in specs]

    async def render_async(self, specs: Sequence[CallSpec]) -> list[CallSpec]:
        """Put the pictures of calls among their tokens, in threads: `render`."""
        return [await self._rendered_async(spec) if _has_pictures(spec) else spec for spec in specs]

    def _rendered(self, spec: CallSpec) -> CallSpec:
        given = self._given(spec)
        prompt = given.prompt()
        with _reporting_what_is_wrong():
            (made,) = self._engine.renderer.render_cmpl([prompt], skip_mm_cache=True)
        return self._checked(spec, made)

    async def _rendered_async(self, spec: CallSpec) -> CallSpec:
        given = self._given(spec)
        prompt = await asyncio.to_thread(given.prompt)
        render = self._engine.renderer.render_cmpl_async
        with _reporting_what_is_wrong():
            (made,) = await render([prompt], skip_mm_cache=True)
        return self._checked(spec, made)

    def _given(self, spec: CallSpec) -> _Given:
        """Tokens and pictures of a call. Raises ChoreoError: as `render`."""
        model = self._engine.vllm_config.model_config
        if not model.supports_multimodal_inputs:
            raise UnsupportedOptionError(
                "this model takes no pictures, or was started without: leave them out, or choose "
                "another model",
                parameter=PARAMETER,
                value=model.model,
            )
        if self._session.mode == "baseline" and self._session.entries.is_limited:
            raise UnsupportedOptionError(
                "on a server a session in baseline mode has no pictures, which its front end would "
                "hold: leave them out, choose another mode, or run the program in process",
                parameter=PARAMETER,
                value="given",
            )
        pictures = pictures_in(spec.multi_modal_data)
        token_ids, _ = self._session.content_of(spec)
        check_placeholders(token_ids, len(pictures), placeholder_of(model), self._decode)
        # The session's tenant, or the operator's, for whom a server encodes what all may read.
        tenant = self._session.tenant if spec.tenant is None else spec.tenant
        return _Given(tenant, token_ids, pictures)

    def part(self, prompt: MultiModalInput, start: int = 0, stop: int | None = None) -> Tokenized:
        """Cut tokens `start … stop-1`, with the pictures among them, out of what vLLM has rendered.

        Args:
            prompt: prompt whose pictures have names as `content_id` gives them, and all their data.

        Raises:
            TooLongError: a picture is too large for the encoder.
        """
        cut = cut_prompt(prompt, start, stop)
        token_ids = tuple(cut["prompt_token_ids"])
        if cut["type"] == "token":
            return Tokenized(self._decode(token_ids), token_ids)
        self._check_size(cut)
        shown, at = list[int](), 0
        for place in cut["mm_placeholders"][IMAGE]:
            token = placeholder_of(self._engine.vllm_config.model_config)
            token = token_ids[place.offset] if token is None else token
            shown += [*token_ids[at : place.offset], token]
            at = place.offset + place.length
        return Tokenized(self._decode([*shown, *token_ids[at:]]), token_ids, cut)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._engine.renderer.get_tokenizer().decode(list(token_ids)))

    def _checked(self, spec: CallSpec, made: object) -> CallSpec:
        """The call with its prompt. Raises TooLongError: a picture is too large for the encoder."""
        prompt = cast("MultiModalInput", made)
        self._check_size(prompt)
        _, text = self._session.content_of(spec)
        content = Tokenized(text, tuple(prompt["prompt_token_ids"]), prompt)
        return replace(spec, content=content, multi_modal_data=None)

    def _check_size(self, prompt: MultiModalInput) -> None:
        limit = self._engine.input_processor.mm_encoder_cache_size
        largest = max(place.get_num_embeds() for place in prompt["mm_placeholders"][IMAGE])
        if largest > limit:
            raise TooLongError(
                f"a picture takes {largest} tokens, and the engine encodes up to {limit} at once; "
                "give a smaller one, or start the engine with a larger max_num_batched_tokens",
                parameter=PARAMETER,
                value=f"{largest} tokens",
            )


def _has_pictures(spec: CallSpec) -> bool:
    return spec.multi_modal_data is not None


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
    from vllm.multimodal.media import MediaWithBytes

    return picture.media if isinstance(picture, MediaWithBytes) else picture


def named_pictures(tenant: str, data: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """Pictures as vLLM's renderer takes them, each with a name by what it shows and by the tenant.

    Args:
        data: pictures in the form of vLLM's prompts, loaded.
        parameter: name of the argument that they come from.

    Raises:
        UnsupportedOptionError: there is something else among them.
        ChoreoError: one is no picture.
    """
    pictures = pictures_in_data(data, parameter)
    return {
        "multi_modal_data": {IMAGE: pictures},
        "multi_modal_uuids": {IMAGE: [content_id(tenant, picture) for picture in pictures]},
    }


def content_id(tenant: str, picture: object) -> str:
    """Name of a picture by all that is seen of it, in hexadecimal digits.

    vLLM's own hash is one for all tenants, and that of an id which a program may put beside it.

    Raises:
        ChoreoError: it is no picture.
    """
    digest = blake2b(digest_size=32)
    for part in (tenant.encode(), *_parts(picture)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(picture: object) -> list[bytes]:
    import numpy as np
    import torch
    from PIL import Image

    if isinstance(picture, Image.Image):
        palette = b"" if picture.palette is None else bytes(picture.palette.palette)
        info = [picture.info.get(key) for key in ("transparency", "exif")]
        shape = repr((picture.mode, picture.size, info)).encode()
        return [b"image", shape, palette, picture.tobytes()]
    if isinstance(picture, torch.Tensor):
        flat = picture.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        shape = repr((picture.dtype, tuple(picture.shape))).encode()
        return [b"tensor", shape, flat.numpy().tobytes()]
    if isinstance(picture, np.ndarray):
        return [b"array", repr((picture.dtype.str, picture.shape)).encode(), picture.tobytes()]
    raise ChoreoError(
        "a picture is a PIL image, a numpy array or a tensor of embeddings",
        parameter=PARAMETER,
        value=type(picture).__name__,
    )


@contextmanager
def _reporting_what_is_wrong() -> Iterator[None]:
    """Raise what vLLM's renderer, or the model's processor, says of bad pictures as our error."""
    from vllm.exceptions import VLLMError

    try:
        yield
    except (VLLMError, ValueError, TypeError, RuntimeError) as error:
        raise ChoreoError(
            f"vLLM makes no prompt of these pictures: {error}", parameter=PARAMETER, value="given"
        ) from error
