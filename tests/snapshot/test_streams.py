# SPDX-License-Identifier: Apache-2.0
"""Files that are digested as they are written and read: right whoever is slow, and side by side."""

from __future__ import annotations

import hashlib
import io
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_choreo.snapshot import streams
from vllm_choreo.snapshot.streams import Digested, ReadAhead


def _digest_after(before: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen before each piece is digested."""

    class Late:
        def __init__(self) -> None:
            self._right = hashlib.sha256()
            self.hexdigest = self._right.hexdigest

        def update(self, piece: Any) -> None:
            before()
            self._right.update(piece)

    monkeypatch.setattr(streams, "hashlib", SimpleNamespace(sha256=Late))


@pytest.mark.parametrize("slow", ["digest", "use", "file"])
def test_pieces_and_digest_are_those_of_the_file(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the second file in the same buffers, and of one that ends before the last piece."""
    rng, buffers = random.Random(1), [bytearray(), bytearray()]

    def delay(who: str) -> None:
        time.sleep(rng.random() / 500 * (slow == who))

    class File(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            delay("file")
            return super().readinto(memoryview(buffer)[: rng.randrange(1, 300)])

    _digest_after(lambda: delay("digest"), monkeypatch)
    for missing in (0, 0, 100):
        sizes = [rng.randrange(1, 500) for _ in range(20)]
        content = rng.randbytes(7 + sum(sizes) - missing)
        with ReadAhead(File(content), buffers) as ahead:
            found = ahead.read(7)
            for piece in ahead.pieces(iter(sizes)):
                delay("use")
                found += piece
            ahead.rest()
            assert found == content
            assert ahead.sha256 == hashlib.sha256(content).hexdigest()
    assert max(map(len, buffers)) < 500


def test_a_piece_is_digested_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    is_used = threading.Semaphore(0)
    in_time: list[bool] = []
    _digest_after(lambda: in_time.append(is_used.acquire(timeout=120)), monkeypatch)
    with ReadAhead(io.BytesIO(bytes(6))) as ahead:
        for _ in ahead.pieces(iter([2, 2, 2])):
            is_used.release()
        assert ahead.sha256 == hashlib.sha256(bytes(6)).hexdigest()
    written = io.BytesIO()
    with Digested(written) as digested:
        digested.write(b"abc")
        is_used.release()
        assert digested.sha256 == hashlib.sha256(b"abc").hexdigest()
    assert in_time == [True] * 4 and written.getvalue() == b"abc" and digested.num_bytes == 3


def test_a_file_that_fails_is_closed_and_its_threads_end() -> None:
    class Broken(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            if self.tell() >= 4:
                raise OSError("gone")
            return super().readinto(buffer)

    file, before = Broken(bytes(8)), threading.active_count()
    with pytest.raises(OSError, match="gone"), ReadAhead(file) as ahead:
        for piece in ahead.pieces(iter([2, 2, 2])):
            assert piece == bytes(2)
    assert file.closed and threading.active_count() == before
