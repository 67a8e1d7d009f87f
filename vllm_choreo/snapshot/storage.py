# SPDX-License-Identifier: Apache-2.0
"""A folder of saved messages, wherever fsspec reaches: a disk, memory, an object store.

    manifest.json                                    what is kept, and in which files
    20260102T030405-9f86d081-00000.safetensors       keys and values of one encoding
    ...

Data is written under names that were never there, and the manifest last, in one move: whoever is
killed leaves the old messages or the new ones. A *generation* is the files of one save, which begin
with the same name. One that no manifest names is removed by the next save, unless it is in use:

    a local disk        a lock on its first file (`file_locks.py`), held by whoever writes or loads
    other storage       what was replaced goes at once, and a load begins again with what replaced
                        it; what a killed save has left goes a day later
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vllm_choreo.errors import KeptError, LimitError, UnknownKeptError
from vllm_choreo.snapshot import file_locks

MANIFEST = "manifest.json"
# Data, or a manifest that was not put into its place: when its save began, and which it was.
_FILE = re.compile(
    rf"(?:{re.escape(MANIFEST)}\.)?((\d{{8}}T\d{{6}})-[0-9a-f]{{8}})(-\d{{5,}}\.safetensors)?"
)
_TIME = "%Y%m%dT%H%M%S"
# So long nobody takes for a save: what a killed one has left, where there are no locks.
_SAVE_SECONDS = 86_400.0
# What a disk takes for a file or a folder, at least.
_DISK_BLOCK = 4096


class SnapshotFolder:
    """A folder of saved messages, and of the files of one save.

    Args:
        uri: a path, or any URL of fsspec's.
        label: the folder's name in errors; None: its URI.
        max_bytes: bytes that a save may write.
        keep_key: key of whoever saves and loads: a manifest written with another one is untrusted.
            None: all are, see `keys.py`.
        options: options of fsspec's file system, such as credentials.

    Raises:
        KeptError: no such storage, or a package for it is missing.
    """

    def __init__(
        self,
        uri: str | Path,
        label: str | None = None,
        max_bytes: float = float("inf"),
        keep_key: bytes | None = None,
        **options: object,
    ) -> None:
        import fsspec

        self.label = str(uri) if label is None else label
        self.max_bytes = max_bytes
        self.keep_key = keep_key
        try:
            self._fs, path = fsspec.core.url_to_fs(str(uri), **options)
        except (ValueError, ImportError) as error:
            raise KeptError(
                f"this storage cannot be reached: {error}", parameter="uri", value=self.label
            ) from None
        self._path = path.rstrip("/")
        self._is_local = "file" in self._fs.protocol
        self._begin()

    def _begin(self) -> None:
        """Name the files of the next save."""
        self._generation = f"{time.strftime(_TIME, time.gmtime())}-{secrets.token_hex(4)}"
        self._written: list[str] = []
        self._is_published = False
        self._is_new = False
        self._lock: int | None = None

    # -- reading -----------------------------------------------------------------------------

    def manifest(self) -> bytes:
        """Read the manifest.

        Raises:
            UnknownKeptError: nothing was saved here.
            KeptError: it cannot be read.
        """
        with self.naming(MANIFEST):
            self._check_plain(MANIFEST)
            content: bytes = self._fs.cat_file(self._at(MANIFEST))
        return content

    @contextmanager
    def reading(self, names: Collection[str]) -> Iterator[None]:
        """Keep a save from removing the files that a manifest names, which has been read.

        A save that has removed them by now has put another manifest into its place. Where there
        are no locks, it may do so meanwhile.
        """
        lock = None
        if self._is_local and names:
            lock = file_locks.lock_shared(self._at(min(names)))
        try:
            yield
        finally:
            file_locks.unlock(lock)

    def text(self, name: str) -> str | None:
        """Read a small file; None: it is not there. Raises KeptError if it cannot be read."""
        with self.naming(name):
            try:
                content: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return content.decode(errors="replace").strip()

    def open(self, name: str) -> tuple[Any, int]:
        """Open a file to read; also its length in bytes. Raises KeptError if it cannot be read."""
        with self.naming(name):
            path = self._at(name)
            self._check_plain(name)
            return self._fs.open(path, "rb"), int(self._fs.size(path))

    def sizes(self) -> dict[str, int]:
        """Folders in this one, and the bytes that each takes, whatever lies there."""
        found = dict.fromkeys(self.names(), 0)
        with self.naming(""):
            entries = self._fs.find(self._path, withdirs=True, detail=True) if found else {}
        for path, entry in entries.items():
            name = path.removeprefix(f"{self._path}/").partition("/")[0]
            if name in found:
                found[name] += _disk_bytes(entry.get("size") or 0)
        return found

    def names(self) -> list[str]:
        """Names of the folders in this one; the operator's has one for each tenant."""
        with self.naming(""):
            if not self._fs.isdir(self._path):
                return []
            found = self._fs.ls(self._path, detail=True, refresh=True)
        return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in found if _is_folder(e))

    # -- writing -----------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder, unless it is there; a save begins."""
        self._begin()
        with self.naming(""):
            self._is_new = self._is_local and not os.path.lexists(self._path)
            self._fs.makedirs(self._path, exist_ok=True)

    def create(self) -> tuple[str, IO[bytes]]:
        """Open a file to write it, of a name that was never there; return the name and the file."""
        name = f"{self._generation}-{len(self._written):05d}.safetensors"
        with self.naming(name):
            file = self._open_new(name)
        self._written.append(name)
        return name, file

    def _open_new(self, name: str) -> IO[bytes]:
        """Open a file to write it; the first one of a save is locked until it is published."""
        file: IO[bytes] = self._fs.open(self._at(name), "wb")
        if self._is_local and self._lock is None:
            self._lock = file_locks.lock_open_file(file.fileno())
        return file

    def publish(self, content: bytes, replaced: set[str]) -> None:
        """Put a manifest in the place of the old one; from now on its messages are the kept ones.

        Args:
            replaced: data files that the old one named.
        """
        with self.naming(MANIFEST):
            part = self._at(f"{MANIFEST}.{self._generation}")
            try:
                with self._open_new(f"{MANIFEST}.{self._generation}") as file:
                    file.write(content)
                    settle(file)
                # From here on the data may be named, whatever interrupts this.
                self._is_published = True
                self._fs.mv(part, self._at(MANIFEST))
            except Exception:
                self._is_published = False
                self._remove([part])
                raise
        self._unlock()
        self._clean(content, replaced - set(self._written))

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole; on a disk for the eyes of its owner alone."""
        part = self._at(f"{name}.{self._generation}")
        with self.naming(name):
            with self._fs.open(part, "wb") as file:
                if self._is_local:
                    os.chmod(part, 0o600)
                file.write(text.encode())
                settle(file)
            self._fs.mv(part, self._at(name))

    def withdraw(self) -> None:
        """Remove the files of this save, and the folder if it made it, unless it is published."""
        if not self._is_published:
            self._remove([self._at(name) for name in self._written])
            if self._is_new:
                with suppress(OSError):  # somebody else has put something there
                    self._fs.rmdir(self._path)
        self._unlock()

    def delete(self) -> None:
        """Remove the folder, whatever is in it; the manifest first, so that half of it is nothing.

        Raises:
            UnknownKeptError: there is none.
        """
        with self.naming(MANIFEST):
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._at(MANIFEST))
            self._fs.rm(self._path, recursive=True)

    def _unlock(self) -> None:
        file_locks.unlock(self._lock)
        self._lock = None

    def _clean(self, content: bytes, replaced: set[str]) -> None:
        """Remove files that no manifest names and nobody uses.

        Args:
            content: bytes of the manifest that was published.
            replaced: data files that the one before named, and this one does not.
        """
        try:
            entries = self._fs.ls(self._path, detail=True, refresh=True)
        except OSError:
            return  # the next save will
        others = defaultdict[str, list[str]](list)
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if (found := _FILE.fullmatch(name)) and found[1] != self._generation:
                others[found[1]].append(name)
        before = time.strftime(_TIME, time.gmtime(time.time() - _SAVE_SECONDS))
        with ExitStack() as locked:
            idle: list[str] = []
            for generation, names in others.items():
                if self._is_idle(names, locked):
                    idle += names
                elif not self._is_local:
                    is_lost = generation < before
                    idle += [name for name in names if is_lost or name in replaced]
            # Another save, which has ended since, may have put its own manifest in the place of
            # this one: then its files are not locked any more, and it removes what is left.
            with suppress(KeptError):
                if self.manifest() == content:
                    self._remove([self._at(name) for name in idle])

    def _is_idle(self, names: list[str], locked: ExitStack) -> bool:
        """Return whether nobody writes or loads a generation, nor will until `locked` ends."""
        if not self._is_local:
            return False
        data = [name for name in names if not name.startswith(MANIFEST)]
        lock = file_locks.try_lock(self._at(min(data or names)))
        locked.callback(file_locks.unlock, lock)
        return lock is not None

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._fs.rm_file(path)
            except OSError:
                continue  # it is not there, or the next save will

    def _check_plain(self, name: str) -> None:
        """Raise OSError for a pipe or a device, from which one could read for ever."""
        if self._is_local and not stat.S_ISREG(os.stat(self._at(name)).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Turn errors of the storage into errors that name the file."""
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


def _is_folder(entry: Mapping[str, Any]) -> bool:
    return bool(entry["type"] == "directory")


def _disk_bytes(size: int) -> int:
    return max(1, -(-size // _DISK_BLOCK)) * _DISK_BLOCK


def check_size(num_bytes: int, max_bytes: float) -> None:
    """Raise LimitError if there is no room for so many bytes."""
    if num_bytes > max_bytes:
        raise LimitError(
            f"there is room for {int(max_bytes)} bytes more: delete what you have saved, save "
            "fewer messages, or recipes alone",
            parameter="max_kept_gib_per_tenant",
            value=f"{num_bytes} bytes",
        )


def settle(file: IO[bytes]) -> None:
    """Write a local file through to the disk: a crash of the machine may else leave it empty."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except (AttributeError, OSError):
        return  # an object store's: it is there when it is closed
