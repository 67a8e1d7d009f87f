# SPDX-License-Identifier: Apache-2.0
"""Models that take pictures: calls on them are text alone (see also the random choreographies)."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from vllm_choreo.engine.scheduler import admission
from vllm_choreo.errors import UnsupportedOptionError


def test_a_call_with_a_picture_is_refused() -> None:
    picture = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="a",
        mm_position=PlaceholderRange(offset=0, length=1),
    )
    options = {"sampling_params": SamplingParams(), "pooling_params": None}
    with pytest.raises(UnsupportedOptionError, match="messages are text") as caught:
        admission._check_options(Request("r", [5, 6], mm_features=[picture], **options))
    assert caught.value.parameter == "mm_features"
    admission._check_options(Request("r", [5, 6], **options))
