# SPDX-License-Identifier: Apache-2.0
"""A bar that shows how many bytes are saved or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


class ByteBar:
    """A progress bar of bytes. Use as a context.

    Args:
        what: the name of what is done.
        num_bytes: bytes in all.
        shown: whether it is shown; None: on a terminal.
    """

    def __init__(self, what: str, num_bytes: int, shown: bool | None) -> None:
        self._options = {"desc": what, "total": num_bytes, "unit": "B", "unit_scale": True}
        self._shown = shown
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> ByteBar:
        if self._shown is not False:
            from tqdm import tqdm

            self._bar = tqdm(disable=None if self._shown is None else False, **self._options)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)
