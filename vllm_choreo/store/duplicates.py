# SPDX-License-Identifier: Apache-2.0
"""Encodings by digest: one can start from another's blocks. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from vllm_choreo.store.encoding import Encoding

# How many of the latest are looked at. One of them holds its blocks as a rule, and no step is to
# walk over all sessions that have the same document.
_LATEST = 16


class Duplicates:
    """All encodings that are not given up, by their digests, in the order in which they came.

    All are listed, for nobody knows which is given up first: a message that one session frees is
    still there in another.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, dict[Encoding, None]] = {}

    def add(self, encoding: Encoding) -> None:
        """Let other encodings start from this one."""
        assert encoding.digest is not None
        self._by_digest.setdefault(encoding.digest, {})[encoding] = None

    def discard(self, encoding: Encoding) -> None:
        """Let no other encoding start from this one any more."""
        if encoding.digest in self._by_digest:
            duplicates = self._by_digest[encoding.digest]
            duplicates.pop(encoding, None)
            if not duplicates:
                del self._by_digest[encoding.digest]

    def clear(self) -> None:
        """Forget all."""
        self._by_digest.clear()

    def most_resident(
        self, encoding: Encoding, may_share: Callable[[Encoding], bool]
    ) -> Encoding | None:
        """Duplicate that holds most tokens, of those that an encoding may start from."""
        assert encoding.digest is not None
        duplicates = self._by_digest.get(encoding.digest, {})
        latest = list(islice(reversed(duplicates), _LATEST))
        # The first one may be whoever keeps it for all others.
        found = [*latest, *islice(duplicates, 1)] if len(duplicates) > _LATEST else latest
        able = [
            duplicate for duplicate in found if duplicate is not encoding and may_share(duplicate)
        ]
        return max(able, key=lambda duplicate: duplicate.num_encoded, default=None)

    def __iter__(self) -> Iterator[Encoding]:
        for duplicates in self._by_digest.values():
            yield from duplicates
