# SPDX-License-Identifier: Apache-2.0
"""`ChoreoError` <-> the JSON of an error in an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from vllm_choreo.errors import ChoreoError, error_from_report
from vllm_choreo.wire.answer import AnswerObject, Doc


class ErrorContent(AnswerObject):
    """Error: what is wrong, and what to do instead."""

    message: str
    type: Annotated[str, Doc(example="UnknownMessageError")]
    param: Annotated[str | None, Doc(example="parents")]
    value: Annotated[str | None, Doc("What was given, as short text.")]
    code: Annotated[int, Doc("The HTTP status.")]


def refusal_json(error: ChoreoError, status: int) -> ErrorContent:
    """The value of `error` in an answer of this status."""
    report = error.to_report()
    return {
        "message": error.message,
        "type": report["type"],
        "param": error.parameter or None,
        "value": None if error.value is None else report["value"],
        "code": status,
    }


def refusal_of(error: Mapping[str, Any]) -> ChoreoError:
    """The error of an error object."""
    param, value = error.get("param"), error.get("value")
    report = {"parameter": param, "value": value, "type": error.get("type")}
    report = {key: entry for key, entry in report.items() if entry is not None}
    return error_from_report({"message": error.get("message", "refused"), **report})
