# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one encoding as a safetensors file that is written and read as a stream.

    8 bytes    length of the header
    header     JSON: dtype, shape and place of every tensor; whose weights made them
    data       layers.0.keys, layers.0.values, ...    each [num_tokens, num_kv_heads, size]
               layers.8.hidden, ...                   each [num_tokens, hidden_size]: what the
                                                      layer was given, if that is kept
               states.0, ...                          each [1, ...]: what the message leaves behind
                                                      it, in models with states

A tensor of keys or of values is a *part*, number `2 * layer`, or one more; those of hidden states
come after all of these, and then those of the state. A *chunk* is what is handed to the workers at
once: some parts with all their tokens, or some tokens of one part. Tensors of other names may
follow; a reader leaves them alone. In an engine with window groups, layers with windows have the
tokens from some token on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from vllm_choreo.errors import KeptError

# By torch's names, which vLLM uses: the name in a safetensors file, and bytes of a number.
_DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
# Bits of infinity, or where there is none of what is no number: the first that are not finite. The
# sign is the first bit.
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C}
CHUNK_BYTES = 16 * 2**20
_SCALES = "kv_scales"  # of the metadata: JSON, `[key_scale, value_scale]` of each layer
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys and values of one token, and of what is kept of a message besides.

    Attributes:
        dtype: dtype of keys and values by torch's name, such as "float32".
        layers: `(num_kv_heads, key_size, value_size)` of each layer; of MLA the key is the rotated
            part of the row, and the value its latent.
        scales: `(key_scale, value_scale)` of each layer whose keys and values are in 8 bits: a key
            is what is stored times its scale. Empty for other dtypes.
        hidden_dtype, hidden_size: dtype and size of the hidden states that a layer is given.
        hidden: layers whose hidden states are kept, ascending.
        firsts: the first token whose keys and values are there, of each layer; empty: all are.
        states: dtype and shape of each tensor of the state at a message's end; empty: none is kept.
    """

    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    scales: tuple[tuple[float, float], ...] = ()
    hidden_dtype: str = "float32"
    hidden_size: int = 0
    hidden: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        dtype: str,
        layers: Sequence[Sequence[int]],
        hidden: tuple[str, int] = ("float32", 0),
        scales: Sequence[Sequence[float]] = (),
        states: Sequence[tuple[str, Sequence[int]]] = (),
    ) -> KVShape:
        """Make a shape of dtypes that files hold.

        Args:
            hidden: dtype and size of hidden states.
            scales, states: see the attributes.

        Raises:
            KeptError: a dtype that files do not hold.
        """
        for found in (dtype, hidden[0], *(of_state for of_state, _ in states)):
            if found not in _DTYPES:
                raise KeptError(
                    f"keys and values of this type cannot be kept, only {', '.join(_DTYPES)}: save "
                    "recipes alone (encodings=False)",
                    parameter="dtype",
                    value=found,
                )
        sizes = tuple((int(heads), int(key), int(value)) for heads, key, value in layers)
        return cls(
            dtype,
            sizes,
            tuple((float(k), float(v)) for k, v in scales),
            *hidden,
            states=tuple((of_state, tuple(map(int, size))) for of_state, size in states),
        )

    def keeping(self, hidden: Sequence[int]) -> KVShape:
        """Shape for a message that keeps the hidden states of these layers."""
        return replace(self, hidden=tuple(hidden))

    def beginning_at(self, firsts: Sequence[int]) -> KVShape:
        """Shape for a message of which each layer has the tokens from one on."""
        return replace(self, firsts=tuple(firsts))

    @property
    def num_kv_parts(self) -> int:
        return 2 * len(self.layers)

    @property
    def num_token_parts(self) -> int:
        """Parts that have rows of tokens; those behind them are of the state."""
        return self.num_kv_parts + len(self.hidden)

    @property
    def num_parts(self) -> int:
        return self.num_token_parts + len(self.states)

    def hidden_layers(self, first: int, last: int) -> tuple[int, ...]:
        """Layers of the parts `first … last-1`; none if these hold anything but hidden states."""
        start = self.num_kv_parts
        return self.hidden[first - start : last - start] if first >= start else ()

    def state_tensors(self, first: int, last: int) -> range:
        """Tensors of the state of the parts `first … last-1`; none if these are of tokens."""
        start = self.num_token_parts
        return range(first - start, last - start) if first >= start else range(0)

    def part_name(self, part: int) -> str:
        """Name of the tensor of a part."""
        if part >= self.num_token_parts:
            return f"states.{part - self.num_token_parts}"
        if part >= self.num_kv_parts:
            return f"layers.{self.hidden[part - self.num_kv_parts]}.hidden"
        return f"layers.{part // 2}.{'values' if part % 2 else 'keys'}"

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Shape of one row of a part."""
        if part >= self.num_token_parts:
            return self.states[part - self.num_token_parts][1]
        if part >= self.num_kv_parts:
            return (self.hidden_size,)
        heads, *sizes = self.layers[part // 2]
        return heads, sizes[part % 2]

    def part_dtype(self, part: int) -> tuple[str, int]:
        """Dtype of a part as a file names it, and the bytes of a number."""
        if part >= self.num_token_parts:
            return _DTYPES[self.states[part - self.num_token_parts][0]]
        return _DTYPES[self.hidden_dtype if part >= self.num_kv_parts else self.dtype]

    def row_bytes(self, part: int) -> int:
        """Bytes of one row of a part: of a token, or of the state."""
        return prod(self.part_shape(part)) * self.part_dtype(part)[1]

    def rows(self, part: int, num_tokens: int) -> range:
        """Rows of a part of a message of so many tokens: tokens that are there, or the state."""
        if part >= self.num_token_parts:
            return range(1)
        is_cut = self.firsts and part < self.num_kv_parts
        return range(self.firsts[part // 2] if is_cut else 0, num_tokens)

    def part_bytes(self, part: int, num_tokens: int) -> int:
        """Bytes of a part of a message of so many tokens."""
        return len(self.rows(part, num_tokens)) * self.row_bytes(part)

    def kind(self, part: int, num_tokens: int) -> tuple[object, ...]:
        """Kind of a part, which all parts of a chunk have: what it holds, dtype and rows."""
        holds = (part >= self.num_kv_parts) + (part >= self.num_token_parts)
        return holds, self.part_dtype(part), self.rows(part, num_tokens)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of all parts of a message of so many tokens."""
        return sum(self.part_bytes(part, num_tokens) for part in range(self.num_parts))

    def tensors(self, num_tokens: int) -> dict[str, dict[str, Any]]:
        """Entries of a header, in the order of the data."""
        entries: dict[str, dict[str, Any]] = {}
        end = 0
        for part in range(self.num_parts):
            start, end = end, end + self.part_bytes(part, num_tokens)
            entries[self.part_name(part)] = {
                "dtype": self.part_dtype(part)[0],
                "shape": [len(self.rows(part, num_tokens)), *self.part_shape(part)],
                "data_offsets": [start, end],
            }
        return entries


@dataclass(frozen=True)
class Chunk:
    """Rows `start … stop-1` of the parts `first … last-1`, `num_bytes` in all.

    In the file, and in a chunk's bytes, one part follows the other.
    """

    first: int
    last: int
    start: int
    stop: int
    num_bytes: int


def chunks(shape: KVShape, num_tokens: int, max_bytes: int = 0) -> Iterator[Chunk]:
    """Chunks of an encoding, in the order of the file.

    A chunk of more than `max_bytes` has only one row. None has parts of two kinds.

    Args:
        max_bytes: bytes of a chunk; 0: `CHUNK_BYTES`.
    """
    max_bytes = max_bytes or CHUNK_BYTES
    part = 0
    while part < shape.num_parts:
        row, rows = shape.row_bytes(part), shape.rows(part, num_tokens)
        if shape.part_bytes(part, num_tokens) > max_bytes:
            step = max(1, max_bytes // row)
            for start in rows[::step]:
                stop = min(start + step, rows.stop)
                yield Chunk(part, part + 1, start, stop, row * (stop - start))
            part += 1
            continue
        first, size, kind = part, 0, shape.kind(part, num_tokens)
        while part < shape.num_parts and shape.kind(part, num_tokens) == kind:
            more = shape.part_bytes(part, num_tokens)
            if size + more > max_bytes:
                break
            size += more
            part += 1
        yield Chunk(first, part, rows.start, rows.stop, size)


def is_finite(data: bytes | memoryview, chunk: Chunk, shape: KVShape) -> bool:
    """Return whether all numbers of a chunk are finite.

    Others would outlive their message in its blocks: slots without a token are read with a weight
    of 0, and 0 times infinity is no number.
    """
    name, size = shape.part_dtype(chunk.first)
    infinity, sign = _INFINITY[name], 1 << (8 * size - 1)
    positive, negative = (np.frombuffer(data, f"<{kind}{size}") for kind in "iu")
    return bool(positive.max() < infinity and negative.max() < sign + infinity)


def header_bytes(shape: KVShape, num_tokens: int, about: Mapping[str, str]) -> bytes:
    """Header of a file, with its length before it; `about` says whose weights made the data."""
    metadata = {**about, **({_SCALES: json.dumps(shape.scales)} if shape.scales else {})}
    header = json.dumps({"__metadata__": metadata, **shape.tensors(num_tokens)}).encode()
    header += b" " * (-len(header) % 8)  # so that the data is aligned
    return len(header).to_bytes(8, "little") + header


class OtherScalesError(Exception):
    """Keys and values in 8 bits that stand for other numbers than the same bytes would here."""


def check_header(header: bytes, shape: KVShape, num_tokens: int) -> None:
    """Check that a header is that of so many tokens of this shape.

    Args:
        header: JSON of the header, without its length.

    Raises:
        ValueError: it is none, or not that of so many tokens of this shape; says why.
        OtherScalesError: it is, but for the scales.
    """
    found = json.loads(header)  # a JSONDecodeError is a ValueError
    if not isinstance(found, dict):
        raise ValueError("the header is no object")
    for name, expected in shape.tensors(num_tokens).items():
        if found.get(name) != expected:
            raise ValueError(f"tensor {name} is {found.get(name)}, not {expected}")
    if shape.scales:
        kept = json.loads(found["__metadata__"][_SCALES])
        _check_scales(kept, [list(scales) for scales in shape.scales])


def _check_scales(kept: object, mine: list[list[float]]) -> None:
    if not isinstance(kept, list) or len(kept) != len(mine):
        raise ValueError(f"{_SCALES} is {kept}")
    for layer, (theirs, ours) in enumerate(zip(kept, mine, strict=True)):
        if theirs != ours:
            raise OtherScalesError(
                "these keys and values were stored with other scales: in layer "
                f"{layer} {theirs} of keys and values, here {ours}"
            )


def header_size(prefix: bytes, num_file_bytes: int) -> int:
    """Length of the header, in bytes.

    Args:
        prefix: the first 8 bytes.

    Raises:
        ValueError: the file cannot have such a header.
    """
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > min(_MAX_HEADER_BYTES, num_file_bytes):
        raise ValueError("it does not begin with a header")
    return size
