# SPDX-License-Identifier: Apache-2.0
"""Form of a transcript, and the check of data against forms; errors name the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from vllm_choreo.convert import MISSING, convert
from vllm_choreo.errors import ChoreoError

_Parent = Annotated[
    tuple[str, int | None, int | None], Meta(description="must be [id, start, stop]")
]


class _Usage(Struct):
    exact: bool
    reused_tokens: int
    repositioned_tokens: int
    encoded_tokens: int
    repaired_tokens: int = 0  # files of before there was repair lack it


class _Metrics(Struct):
    submitted: float
    waiting: float | None
    ttft: float | None
    latency: float


class _Step(Struct):
    stage: str
    author: str
    id: str
    parents: list[_Parent]
    position: int
    num_tokens: int
    token_ids: list[int]
    text: str
    generated_token_ids: list[int]
    generated_text: str
    finish_reason: str | None
    usage: _Usage
    metrics: _Metrics
    # Files of before there were any lack them.
    offsets: list[int | None] | None = None
    new_offset: int | None = None
    role: str | None = None


class _Transcript(Struct):
    workflow: str
    mode: str
    seconds: float
    answers: list[str]
    inputs: dict[str, Any]
    steps: list[_Step]


def check_transcript(data: Mapping[str, Any]) -> None:
    """Check that data have the form of a transcript.

    Raises:
        ValueError: some part is missing, or of another type than `to_json` writes.
    """
    check_form(data, _Transcript, "the file")
    for i, step in enumerate(data["steps"]):
        for name in ("token_ids", "generated_token_ids"):
            if any(token < 0 for token in step[name]):
                raise ValueError(f"steps[{i}].{name} must hold token ids, which are 0 or more")


def check_form(value: object, form: object, place: str) -> None:
    """Check that a value, found at `place`, is of a form: a type as `convert` takes it.

    Raises:
        ValueError: it is not.
    """
    try:
        convert(value, form, place)
    except ChoreoError as error:
        found = "" if error.message == MISSING else f", not {_shown(error.value)}"
        place = error.parameter.removeprefix("the file.")
        raise ValueError(f"{place} {error.message}{found}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
