# SPDX-License-Identifier: Apache-2.0
"""Writing of whole files: an interrupted write leaves the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the file at `path` by the one that `write` makes at the path that it is given."""
    part = path.with_name(path.name + ".part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())  # or a crash of the machine may leave an empty file
    os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by a text, as UTF-8."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
