# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or not there: whoever is interrupted leaves the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Put what `write` makes at the path that it is given in the place of `path`."""
    part = path.with_name(path.name + ".part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())  # or a crash of the machine may leave an empty file
    os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    """Put a text, as UTF-8, in the place of a file."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
