# SPDX-License-Identifier: Apache-2.0
"""Pictures among the tokens of encodings, and the memory that these take. Neither torch nor vllm.

A recipe holds what the model's encoder is given of each picture, for as long as anything may have
to be encoded again by it. Equal pictures of a tenant are held once, whoever shows them.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from vllm_choreo.errors import LimitError
from vllm_choreo.semantics.pictures import PARAMETER

SETTING = "additional_config.choreo.picture_memory_gib"


@dataclass(eq=False)
class HeldPicture:
    """Input of the model's encoder for a picture; held by all recipes that have it.

    Attributes:
        data: as vLLM has it.
        num_bytes: bytes that it takes.
    """

    data: object
    num_bytes: int


@dataclass(frozen=True)
class Picture:
    """A picture among the tokens of an encoding.

    Attributes:
        start: index of its first token; negative where the encoding begins inside of it.
        num_tokens: tokens that stand for it in a prompt.
        content: hash of what the model's encoder is given, and of the adapter that it has.
        num_positions: positions that it takes, where these have several rows (M-RoPE): as many as
            the longest side of its grid; None: one for each token, as text.
        feature: input of vLLM's encoder, with which it runs again, as vLLM has it.
        held: the data of the feature.
    """

    start: int
    num_tokens: int
    content: str
    num_positions: int | None = None
    feature: object = field(default=None, compare=False, repr=False)
    held: HeldPicture | None = field(default=None, compare=False, repr=False)


def cut_pictures(pictures: Iterable[Picture], start: int, stop: int) -> tuple[Picture, ...]:
    """Pictures of which tokens lie in `[start, stop)`, counted from `start`."""
    return tuple(
        replace(picture, start=picture.start - start)
        for picture in pictures
        if picture.start < stop and start < picture.start + picture.num_tokens
    )


class PictureMemory:
    """Memory for the pictures of all recipes.

    Args:
        max_bytes: bytes that they may take.
        max_bytes_per_tenant: bytes that those of one tenant may take.
        collect: frees what only reference cycles hold, as messages and their encodings are.
    """

    def __init__(
        self, max_bytes: int, max_bytes_per_tenant: int, collect: Callable[[], object]
    ) -> None:
        self.max_bytes = max_bytes
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._collect = collect
        self._held: weakref.WeakValueDictionary[tuple[str, str], HeldPicture] = (
            weakref.WeakValueDictionary()
        )
        self._num_bytes: Counter[str] = Counter()
        # What was given up: any thread may find that, in the middle of anything.
        self._released: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that pictures take now."""
        while self._released:
            tenant, num_bytes = self._released.popleft()
            self._num_bytes[tenant] -= num_bytes
            if not self._num_bytes[tenant]:
                del self._num_bytes[tenant]
        return self._num_bytes.total()

    def hold(self, tenant: str, name: str, data: object, num_bytes: int) -> HeldPicture:
        """Hold a picture, or find the equal one that is held, until nobody has it any more.

        Args:
            name: hash of the picture.

        Raises:
            LimitError: there is no room.
        """
        held = self._held.get((tenant, name))
        if held is not None:
            return held
        if self._num_free(tenant) < num_bytes:
            self._collect()
        if (num_free := self._num_free(tenant)) < num_bytes:
            raise LimitError(
                f"a picture of {num_bytes} bytes, as the model's encoder is given it, is kept with "
                f"its message, and {num_free} are free; free messages with pictures and those "
                f"encoded behind them, send smaller ones, or start the engine with more "
                f"({SETTING})",
                parameter=PARAMETER,
                value=f"{num_bytes} bytes",
            )
        held = self._held[tenant, name] = HeldPicture(data, num_bytes)
        self._num_bytes[tenant] += num_bytes
        weakref.finalize(held, self._released.append, (tenant, num_bytes)).atexit = False
        return held

    def _num_free(self, tenant: str) -> int:
        free = self.max_bytes - self.num_bytes
        return max(0, min(free, self._max_bytes_per_tenant - self._num_bytes[tenant]))
