# SPDX-License-Identifier: Apache-2.0
"""A folder of kept messages, wherever fsspec reaches: a disk, memory, an object store.

    manifest.json                                    what is kept, and in which files
    20260102T030405-9f86d081-00000.safetensors       keys and values of one encoding
    ...

Data is written under names that were never there, and the manifest last, in one move: whoever is
killed leaves the old messages or the new ones. What he leaves behind, a later save removes.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_choreo.errors import KeptError, UnknownKeptError

MANIFEST = "manifest.json"
_DATA = re.compile(r"(\d{8}T\d{6})-[0-9a-f]{8}-\d{5,}\.safetensors")
_TIME = "%Y%m%dT%H%M%S"
# So long nobody takes for a save: data that no manifest names is left alone until then.
_SAVE_SECONDS = 86_400.0


class KeptFolder:
    """
    Args:
        uri: a path, or any URL of fsspec's.
        label: what errors call the folder; None: its URI.
        max_bytes: that keys and values may take.
        options: of fsspec's file system, such as credentials.

    Raises:
        KeptError: no such storage, or a package for it is missing.
    """

    def __init__(
        self, uri: Any, label: str | None = None, max_bytes: float = float("inf"), **options: Any
    ) -> None:
        import fsspec

        self.label = str(uri) if label is None else label
        self.max_bytes = max_bytes
        try:
            self._fs, path = fsspec.core.url_to_fs(str(uri), **options)
        except (ValueError, ImportError) as error:
            raise KeptError(
                f"this storage cannot be reached: {error}", parameter="uri", value=self.label
            ) from None
        self._path = path.rstrip("/")
        self._save = f"{time.strftime(_TIME, time.gmtime())}-{secrets.token_hex(4)}"
        self._written: list[str] = []
        self._is_published = False

    # -- reading -----------------------------------------------------------------------------

    def manifest(self) -> bytes:
        """
        Raises:
            UnknownKeptError: nothing was saved here.
            KeptError: it cannot be read.
        """
        with self.naming(MANIFEST):
            content: bytes = self._fs.cat_file(self._at(MANIFEST))
        return content

    def text(self, name: str) -> str | None:
        """A small file; None: it is not there. Raises KeptError: it cannot be read."""
        with self.naming(name):
            try:
                content: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return content.decode(errors="replace").strip()

    def open(self, name: str) -> tuple[Any, int]:
        """A file to be read, and its length in bytes. Raises KeptError: it cannot be read."""
        with self.naming(name):
            path = self._at(name)
            return self._fs.open(path, "rb"), int(self._fs.size(path))

    def names(self) -> list[str]:
        """The folders in this one, such as the operator's has one for each tenant."""
        with self.naming(""):
            if not self._fs.isdir(self._path):
                return []
            found = self._fs.ls(self._path, detail=True, refresh=True)
        return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in found if _is_folder(e))

    # -- writing -----------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder, unless it is there."""
        with self.naming(""):
            self._fs.makedirs(self._path, exist_ok=True)

    def create(self) -> tuple[str, Any]:
        """A file of a name that was never there: the name, and the file to be written."""
        name = f"{self._save}-{len(self._written):05d}.safetensors"
        with self.naming(name):
            file = self._fs.open(self._at(name), "wb")
        self._written.append(name)
        return name, file

    def publish(self, content: bytes, replaced: set[str]) -> None:
        """Put a manifest in the place of the old one; from now on its messages are the kept ones.

        Args:
            replaced: data that the old one named.
        """
        with self.naming(MANIFEST):
            part = self._at(f"{MANIFEST}.{self._save}")
            try:
                with self._fs.open(part, "wb") as file:
                    file.write(content)
                    settle(file)
                # From here on the data may be named, whatever interrupts this.
                self._is_published = True
                self._fs.mv(part, self._at(MANIFEST))
            except Exception:
                self._is_published = False
                self._remove([part])
                raise
        self._clean(replaced - set(self._written))

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole; on a disk for the eyes of its owner alone."""
        part = self._at(f"{name}.{self._save}")
        with self.naming(name):
            with self._fs.open(part, "wb") as file:
                if "file" in self._fs.protocol:
                    os.chmod(part, 0o600)
                file.write(text.encode())
                settle(file)
            self._fs.mv(part, self._at(name))

    def withdraw(self) -> None:
        """Remove what this save has written, unless it is published."""
        if not self._is_published:
            self._remove([self._at(name) for name in self._written])

    def delete(self) -> None:
        """Remove the folder; the manifest first, so that half of it is nothing."""
        with self.naming(MANIFEST):
            self._fs.rm_file(self._at(MANIFEST))
            self._fs.rm(self._path, recursive=True)

    def _clean(self, replaced: set[str]) -> None:
        before = time.strftime(_TIME, time.gmtime(time.time() - _SAVE_SECONDS))
        try:
            entries = self._fs.ls(self._path, detail=True, refresh=True)
        except OSError:
            return  # the next save will
        found = [entry["name"].rpartition("/")[2] for entry in entries]
        lost = {name for name in found if (m := _DATA.fullmatch(name)) and m[1] < before}
        kept = set(self._written)
        self._remove([self._at(name) for name in found if name in (replaced | lost) - kept])

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._fs.rm_file(path)
            except OSError:
                continue  # it is not there, or the next save will

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Errors of the storage name the file."""
        file = f"{self.label}/{name}" if name else self.label
        try:
            yield
        except FileNotFoundError:
            if name == MANIFEST:
                raise UnknownKeptError(
                    "nothing was saved here, or the save was never finished",
                    parameter="uri",
                    value=self.label,
                ) from None
            raise KeptError("the file is not there", parameter="uri", value=file) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise KeptError(f"the storage failed: {reason}", parameter="uri", value=file) from error


def _is_folder(entry: Any) -> bool:
    return bool(entry["type"] == "directory")


def settle(file: Any) -> None:
    """Have the bytes of a local file on the disk: a crash of the machine may leave it empty."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except (AttributeError, OSError):
        return  # an object store's: it is there when it is closed
