# SPDX-License-Identifier: Apache-2.0
"""Hidden states that workers hold of encodings: which, and how much. Neither torch nor vllm.

The input of a layer is captured on request when a message is encoded, in memory of the workers, and
lets later calls repair the message from that layer on. It stays when keys and values are evicted,
and goes when its encoding is given up; while a patch that was made of it is encoded again, and for
nothing else, it is captured again. What has room has it until it is given up: or what others had
captured meanwhile would leave it none, and it could not be encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from vllm_choreo.errors import ChoreoError, LimitError, RepairError, UnsupportedOptionError
from vllm_choreo.repair.layers import LayerRanges, Range
from vllm_choreo.repair.rules import ByLayers
from vllm_choreo.store.encoding import Encoding

SETTING = "additional_config.choreo.hidden_memory_gib"


class HiddenStateIndex:
    """Encodings whose hidden states workers hold, and the bytes that these take.

    Args:
        num_layers: layers of the model.
        row_bytes: bytes of one token in one layer.
        block_size: rows, of one token each, in a block of the workers' memory.
        max_bytes: bytes that each worker has for them.

    Attributes:
        num_layers, max_bytes: the arguments of these names.
    """

    def __init__(self, num_layers: int, row_bytes: int, block_size: int, max_bytes: int) -> None:
        self.num_layers = num_layers
        self._block_size = block_size
        self._block_bytes = row_bytes * block_size
        self.max_bytes = max_bytes
        self._keys: dict[Encoding, int] = {}
        self._most_tokens: dict[Encoding, int] = {}
        self._new_keys = count(1)
        self._forgotten: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, or will be; for what is still generated, the most that may be."""
        return sum(
            self._size(len(e.hidden_layers), e.num_tokens or self._most_tokens.get(e, 0))
            for e in self._keys
        )

    def check(self, layers: tuple[int, ...], num_tokens: int) -> None:
        """Check that the hidden states of a new message can be kept.

        Args:
            layers: layers whose hidden states it is to keep.
            num_tokens: tokens that it has at most.

        Raises:
            ChoreoError: the model has no such layer.
            LimitError: there is no room.
        """
        if layers[-1] >= self.num_layers:
            raise ChoreoError(
                f"the model has {self.num_layers} layers, the last one is {self.num_layers - 1}",
                parameter="keep_hidden",
                value=list(layers),
            )
        if error := self._limit_error(layers, num_tokens):
            raise error

    def check_ranges(self, ranges: Sequence[Range], parameter: str) -> None:
        """Raise RepairError unless the model has all of these layers."""
        if ranges[-1][1] > self.num_layers:
            raise RepairError(
                f"the model has {self.num_layers} layers", parameter=parameter, value=list(ranges)
            )

    def add(self, encoding: Encoding, layers: tuple[int, ...], num_tokens: int) -> None:
        """Add the hidden states of a new message, as `check` allowed."""
        encoding.hidden_layers = layers
        self._most_tokens[encoding] = num_tokens
        self.key(encoding)

    def key(self, encoding: Encoding) -> int:
        """Key under which workers keep the hidden states of an encoding, from now on if need be."""
        if encoding not in self._keys:
            self._keys[encoding] = next(self._new_keys)
        return self._keys[encoding]

    def find(self, encoding: Encoding) -> int | None:
        """Key under which workers keep hidden states of an encoding; None: they keep none."""
        return self._keys.get(encoding)

    def add_again(self, encoding: Encoding) -> LimitError | None:
        """Add what an encoding that was given up had; return an error if that does not fit."""
        if encoding.hidden_layers and encoding not in self._keys:
            if error := self._limit_error(encoding.hidden_layers, encoding.num_tokens):
                return error
            self.key(encoding)
        return None

    def release(self, encoding: Encoding) -> None:
        """Forget the hidden states of an encoding that no new call reads.

        If it is encoded once more, they are captured once more where a patch begins with them.
        """
        self._most_tokens.pop(encoding, None)
        key = self._keys.pop(encoding, None)
        if key is not None:
            self._forgotten.append(key)
        if not encoding.is_entered:
            encoding.hidden_layers = ()

    def clear(self) -> None:
        """Forget all hidden states but those of encodings that are made, or read, now.

        The others have their room still, and keep them there again when they are encoded again.
        """
        for encoding in [e for e in self._keys if not (e.num_readers or e.encoders)]:
            self._forgotten.append(self._keys[encoding])
            self._keys[encoding] = next(self._new_keys)

    def take_forgotten(self) -> tuple[int, ...]:
        """Take the keys whose hidden states workers need no longer."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def _limit_error(self, layers: tuple[int, ...], num_tokens: int) -> LimitError | None:
        need = self._size(len(layers), num_tokens)
        if self.num_bytes + need <= self.max_bytes:
            return None
        return LimitError(
            f"hidden states of up to {num_tokens} tokens in {len(layers)} layers need {need} "
            f"bytes, and {self.max_bytes - self.num_bytes} of {self.max_bytes} are free; "
            f"free messages, generate fewer tokens, or start the engine with more ({SETTING})",
            parameter="keep_hidden",
            value=list(layers),
        )

    def _size(self, num_layers: int, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_bytes * num_layers


def check_memory(index: HiddenStateIndex | None, layers: tuple[int, ...], num_tokens: int) -> None:
    """Check that the hidden states of a new message can be kept, if any are asked for.

    Raises:
        ChoreoError: the engine keeps none; or as `HiddenStateIndex.check`.
    """
    if layers:
        needed(index, "keep_hidden", list(layers)).check(layers, num_tokens)


def needed(index: HiddenStateIndex | None, parameter: str, value: object) -> HiddenStateIndex:
    """Return the index that an option needs.

    Raises:
        UnsupportedOptionError: the engine keeps no hidden states, and runs no part of its layers.
    """
    if index is None:
        raise UnsupportedOptionError(
            "the engine was started without memory for hidden states, and so without runs of some "
            f"layers: set {SETTING}",
            parameter=parameter,
            value=value,
        )
    return index


def asked_layers(rule: ByLayers, index: HiddenStateIndex | None) -> LayerRanges | None:
    """Layers of a rule; None: all that the model has.

    Raises:
        RepairError: the model has not all of them.
        UnsupportedOptionError: the engine runs no part of its layers.
    """
    index = needed(index, "repair", rule.to_json())
    index.check_ranges(rule.ranges, "repair.layers")
    found = LayerRanges(rule.ranges, index.num_layers)
    return None if found.is_all else found


def check_entries(encoding: Encoding, layers: LayerRanges) -> None:
    """Check that an encoding has the hidden states with which ranges of layers begin.

    Raises:
        RepairError: the hidden states with which a range begins were not captured.
    """
    missing = [layer for layer in layers.entries if layer not in encoding.hidden_layers]
    if missing:
        raise RepairError(
            f"nobody kept what layer {missing[0]} was given when this parent was encoded: "
            f"make it with keep_hidden={missing}, or repair from another layer on "
            f"(kept: {list(encoding.hidden_layers)}, and 0 is always possible)",
            parameter="repair.layers",
            value=encoding.message.id,
        )
