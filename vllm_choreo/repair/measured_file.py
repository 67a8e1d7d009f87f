# SPDX-License-Identifier: Apache-2.0
"""Common part of the files that hold what was measured for one model: policies and profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from msgspec import Struct, to_builtins

from vllm_choreo.convert import convert
from vllm_choreo.errors import RepairError
from vllm_choreo.files import write_text


class MeasuredFile(Struct, frozen=True, tag_field="by"):
    """A file of plain data, with the tag of its kind; keys that this version lacks are left out."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, as the file holds it."""
        data: dict[str, Any] = to_builtins(self)
        return data

    def save(self, path: Path) -> None:
        """Write the file; the old one or the new one if interrupted."""
        write_text(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read plain data, as `to_json` returns them.

        Raises:
            RepairError: they are of another format; names the place.
        """
        return convert(data, cls, "repair", RepairError)


def read_json(path: str | Path) -> Any:
    """Read the JSON of a file that `repair=` names.

    Raises:
        RepairError: it cannot be read.
    """
    try:
        return json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RepairError(
            f"the file cannot be read: {error}", parameter="repair", value=str(path)
        ) from error
