# SPDX-License-Identifier: Apache-2.0
"""Pictures of calls: from vLLM's features of a request to recipes, and back.

vLLM counts a feature's place in a prompt. A call's prompt is its virtual sequence, so that a
picture lies `base` behind its place in the message; wherever the tokens of an encoding are run, its
pictures are put there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_choreo.engine.picture_files import picture_bytes, picture_of
from vllm_choreo.engine.pictures import reason_for_no_pictures
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.semantics.pictures import PARAMETER
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.pictures import Picture, PictureMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.request import Request


class PictureRules:
    """Rules for the pictures that calls of an engine may have.

    Args:
        vllm_config: the engine's configuration.
        memory: memory for the pictures of all calls; None: there is none.
    """

    def __init__(self, vllm_config: VllmConfig, memory: PictureMemory | None) -> None:
        self._reason = reason_for_no_pictures(vllm_config, memory is not None)
        self._memory = memory
        model = vllm_config.model_config
        self._merge_size: int | None = None
        if model.uses_mrope and self._reason is None:
            self._merge_size = model.hf_config.vision_config.spatial_merge_size

    def pictures_of(self, request: Request, tenant: str) -> tuple[Picture, ...]:
        """Pictures among the tokens of a request, each with what vLLM's encoder needs.

        Raises:
            UnsupportedOptionError: the engine takes none in calls, or none of their kind.
            LimitError: there is no room for one.
        """
        features = request.mm_features
        if not features:
            return ()
        self._check(PARAMETER)
        for feature in features:
            if feature.modality != "image" or feature.data is None:
                raise UnsupportedOptionError(
                    "messages hold text and pictures: leave videos and sound out",
                    parameter=PARAMETER,
                    value=feature.modality,
                )
        return tuple(self._picture(feature, tenant) for feature in features)

    def loaded(self, found: Sequence[Mapping[str, Any]], tenant: str) -> list[Picture]:
        """Pictures of messages that are loaded, as the first tokens of each.

        Args:
            found: `name` and `content` of each, see `engine/picture_files.py`.

        Raises:
            KeptError: one is damaged.
            UnsupportedOptionError, LimitError: as `pictures_of`.
        """
        if found:
            self._check("uri")
        features = [picture_of(entry["content"], entry["name"]) for entry in found]
        return [self._picture(feature, tenant) for feature in features]

    def _check(self, parameter: str) -> None:
        if self._reason is not None:
            raise UnsupportedOptionError(
                f"{self._reason}; leave pictures out", parameter=parameter, value="given"
            )

    def _picture(self, feature: MultiModalFeatureSpec, tenant: str) -> Picture:
        place, data, num_positions = feature.mm_position, feature.data, None
        assert self._memory is not None and data is not None, "or it would have been refused"
        name = feature.mm_hash or feature.identifier
        held = self._memory.hold(tenant, name, data, MultiModalCache.get_item_size(data))
        feature = replace(feature, data=cast("MultiModalKwargsItem", held.data))
        if self._merge_size is not None:
            frames, height, width = data["image_grid_thw"].data.flatten().tolist()
            num_positions = max(frames, height // self._merge_size, width // self._merge_size)
        return Picture(place.offset, place.length, feature.identifier, num_positions, feature, held)


def saved_picture(picture: Picture) -> bytes:
    """Bytes of a picture, for files.

    Raises:
        UnsupportedOptionError: files do not hold such a one.
    """
    feature = cast("MultiModalFeatureSpec", picture.feature)
    if feature.mm_hash not in (None, feature.identifier):
        raise UnsupportedOptionError(
            "an adapter of the model's encoder of pictures has made what a message shows, and "
            "files name pictures without: start the engine without adapters of the encoder "
            "(enable_tower_connector_lora), or save messages that have no pictures",
            parameter="messages",
            value=feature.identifier,
        )
    return picture_bytes(feature)


def features_at(
    pictures: Sequence[Picture], base: int, num_tokens: int
) -> list[MultiModalFeatureSpec]:
    """Features of a prompt in which token 0 of an encoding has the index `base`.

    Args:
        pictures: those of the encoding.
        num_tokens: tokens of the prompt; features that lie before or behind them are left out.
    """
    features = []
    for picture in pictures:
        offset = base + picture.start
        if offset < num_tokens and offset + picture.num_tokens > 0:
            feature = cast("MultiModalFeatureSpec", picture.feature)
            place = replace(feature.mm_position, offset=offset)
            features.append(replace(feature, mm_position=place))
    return features


def copied_pictures(
    origin: Encoding, token_ids: Sequence[int], given: Sequence[Picture]
) -> tuple[Picture, ...]:
    """Pictures of a message that has the tokens of `origin`, encoded anew.

    Args:
        given: pictures that came with the call.

    Raises:
        UnsupportedOptionError: it has a part of them alone, or some came with the call.
    """
    if given:
        raise UnsupportedOptionError(
            "what is encoded anew has the pictures of copy_of: leave others out",
            parameter=PARAMETER,
            value=f"{len(given)} pictures",
        )
    if origin.pictures and list(token_ids) != origin.token_ids:
        raise UnsupportedOptionError(
            "a message with pictures is encoded anew as a whole: name all of it",
            parameter="copy_of",
            value=origin.message.id,
        )
    return origin.pictures
