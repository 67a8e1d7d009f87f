# SPDX-License-Identifier: Apache-2.0
"""Metadata of a GGUF file, and the error of a file that cannot be converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf

# Kinds of tokens, `tokenizer.ggml.token_type`.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


class ConversionError(RuntimeError):
    """The GGUF file cannot be converted, or the written files do not read back the same."""


class Fields:
    """Metadata of a GGUF file by key.

    Raises:
        ConversionError: the file has no such key.
    """

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self._values: dict[str, object] = {}  # lists of all tokens take long to read

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ConversionError(f"The GGUF file has no {key}: not a model of a known kind.")
        return self.get(key)

    def get(self, key: str) -> object:
        """Return the value of a key, or None."""
        if key in self._fields and key not in self._values:
            self._values[key] = self._fields[key].contents()
        return self._values.get(key)

    def real(self, key: str) -> float:
        """Number that was meant in decimal: GGUF's float32 to seven digits (1e-05)."""
        return float(f"{self[key]:.7g}")

    def token_ids(self, kind: int) -> list[int]:
        """Ids of the tokens of one kind, in their order."""
        return [i for i, found in enumerate(self["tokenizer.ggml.token_type"]) if found == kind]
