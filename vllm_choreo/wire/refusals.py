# SPDX-License-Identifier: Apache-2.0
"""`ChoreoError` <-> the JSON of an error in an answer.

{"message": what is wrong and what to do, "type": the class, "param": which argument,
 "value": what was given, as short text, "code": the HTTP status}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_choreo.errors import ChoreoError, error_from_report


def refusal_json(error: ChoreoError, status: int) -> dict[str, Any]:
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
