# SPDX-License-Identifier: Apache-2.0
"""Files that are digested as they are written and read.

To digest takes longer than to read, and than to put the bytes read into their place: neither waits
for the other.

    a thread     read 1   read 2     read 3     ...
    another               digest 1   digest 2   ...
    the caller            uses 1     uses 2     ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Writable(Protocol):
    """File that is written."""

    def write(self, data: bytes, /) -> object: ...


class Readable(Protocol):
    """File that is read into memory which its reader gives."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def close(self) -> None: ...


class BackgroundDigest:
    """SHA-256 of pieces, each digested in a thread while the caller uses it."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="choreo-digest")
        self._latest: Future[None] | None = None

    def add(self, piece: Buffer) -> None:
        """Begin with a piece, when the one before is done. It must not change until `wait`."""
        self.wait()
        self._latest = self._thread.submit(self._sha256.update, piece)

    def wait(self) -> None:
        """Wait until all pieces that were added are digested."""
        if self._latest is not None:
            self._latest.result()
            self._latest = None

    @property
    def sha256(self) -> str:
        """Digest of all pieces that were added, in hex."""
        self.wait()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class Digested:
    """Writer of a file that digests the bytes it writes.

    Args:
        file: the file to be written; whoever opened it closes it.

    Use as a context.
    """

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._digest = BackgroundDigest()
        self.num_bytes = 0

    def __enter__(self) -> Digested:
        return self

    def __exit__(self, *raised: object) -> None:
        self._digest.close()

    def write(self, data: bytes) -> None:
        self._digest.add(data)
        self._file.write(data)
        self.num_bytes += len(data)

    @property
    def sha256(self) -> str:
        """Digest of all bytes that have been written, in hex."""
        return self._digest.sha256


class ReadAhead:
    """Reader that digests a file in pieces, and reads the next one while the last one is used.

    Args:
        file: the file to be read, from its beginning.
        buffers: two for the pieces, which grow. Files that are read one after the other can share
            them: fresh memory for each takes as long as reading it. None: its own.

    Use as a context; it closes the file.
    """

    def __init__(self, file: Readable, buffers: list[bytearray] | None = None) -> None:
        self._file = file
        self._buffers = [bytearray(), bytearray()] if buffers is None else buffers
        self._digest = BackgroundDigest()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="choreo-read")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.shutdown(wait=True)
        self._digest.close()
        self._file.close()

    def read(self, num_bytes: int) -> bytes:
        """Read the next bytes; fewer where the file ends."""
        return bytes(self._added(self._fill(memoryview(bytearray(num_bytes)))))

    def pieces(self, sizes: Iterator[int]) -> Iterator[memoryview]:
        """Read pieces of these sizes, shorter where the file ends.

        A piece stays as it is until the next is asked for.
        """
        ahead: Future[memoryview] | None = None
        for number, size in enumerate(sizes):
            self._digest.wait()  # the buffer that is filled next holds what is digested
            following = self._thread.submit(self._fill, self._buffer(number % 2, size))
            if ahead is not None:
                yield self._added(ahead.result())
            ahead = following
        if ahead is not None:
            yield self._added(ahead.result())

    def rest(self) -> None:
        """Read the rest of the file and digest it."""
        while self.read(2**20):
            pass

    @property
    def sha256(self) -> str:
        """Digest of all bytes that have been read, in hex."""
        return self._digest.sha256

    def _buffer(self, number: int, size: int) -> memoryview:
        if len(self._buffers[number]) < size:
            self._buffers[number] = bytearray(size)
        return memoryview(self._buffers[number])[:size]

    def _added(self, piece: memoryview) -> memoryview:
        self._digest.add(piece)
        return piece

    def _fill(self, view: memoryview) -> memoryview:
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])
            if not count:
                break
            filled += count
        return view[:filled]
