# SPDX-License-Identifier: Apache-2.0
"""Forms of the objects in answers: what writes them returns them, and /openapi.json describes them.

A form is a `TypedDict`, so that an object is a plain dict and checked before it runs. Neither
pydantic, which makes the description of a server, nor vllm is needed to read an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12


class AnswerObject(TypedDict):
    """An object of an answer: keys of these types, and no others."""


@dataclass(frozen=True)
class Doc:
    """Description of a key: `id: Annotated[str, Doc("…")]`."""

    description: str = ""
    example: str = ""

    def __get_pydantic_json_schema__(
        self, schema: object, describe: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        described = describe(schema)
        if self.description:
            described["description"] = self.description
        if self.example:
            described["examples"] = [self.example]
        return described
