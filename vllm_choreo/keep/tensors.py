# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one encoding as a safetensors file that is written and read as a stream.

    8 bytes    length of the header
    header     JSON: dtype, shape and place of every tensor; whose weights made them
    data       layers.0.keys, layers.0.values, ...    each [num_tokens, num_kv_heads, head_size]

A tensor of keys or of values is a *part*, number `2 * layer`, or one more. A *chunk* is what is
handed to the workers at once: some parts with all their tokens, or some tokens of one part. Tensors
of other names may follow; a reader leaves them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.errors import KeptError

# By torch's names, which vLLM uses: the name in a safetensors file, and bytes of a number.
_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
CHUNK_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class KVShape:
    """What the keys and values of one token look like.

    Attributes:
        dtype: torch's name, such as "float32".
        layers: of each, the number of heads that have keys, and the size of a head.
    """

    dtype: str
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, dtype: str, layers: Sequence[Sequence[int]]) -> KVShape:
        """
        Raises:
            KeptError: a dtype that files do not hold.
        """
        if dtype not in _DTYPES:
            raise KeptError(
                f"keys and values of this type cannot be kept, only {', '.join(_DTYPES)}: save "
                "recipes alone (encodings=False)",
                parameter="dtype",
                value=dtype,
            )
        return cls(dtype, tuple((int(heads), int(size)) for heads, size in layers))

    @property
    def num_parts(self) -> int:
        return 2 * len(self.layers)

    def row_bytes(self, part: int) -> int:
        """Of one token in a part."""
        heads, size = self.layers[part // 2]
        return heads * size * _DTYPES[self.dtype][1]

    @property
    def token_bytes(self) -> int:
        """Of one token in all parts."""
        return sum(map(self.row_bytes, range(self.num_parts)))

    def tensors(self, num_tokens: int) -> dict[str, dict[str, Any]]:
        """The entries of a header, in the order of the data."""
        entries: dict[str, dict[str, Any]] = {}
        end = 0
        for part in range(self.num_parts):
            start, end = end, end + num_tokens * self.row_bytes(part)
            entries[part_name(part)] = {
                "dtype": _DTYPES[self.dtype][0],
                "shape": [num_tokens, *self.layers[part // 2]],
                "data_offsets": [start, end],
            }
        return entries


def part_name(part: int) -> str:
    """The tensor of a part."""
    return f"layers.{part // 2}.{'values' if part % 2 else 'keys'}"


@dataclass(frozen=True)
class Chunk:
    """Tokens `start … stop-1` of the parts `first … last-1`, `num_bytes` in all.

    In the file, and in a chunk's bytes, one part follows the other.
    """

    first: int
    last: int
    start: int
    stop: int
    num_bytes: int


def chunks(shape: KVShape, num_tokens: int, max_bytes: int = 0) -> Iterator[Chunk]:
    """All of an encoding, in the order of the file; of more than `max_bytes` only one token.

    Args:
        max_bytes: 0: `CHUNK_BYTES`.
    """
    max_bytes = max_bytes or CHUNK_BYTES
    part = 0
    while part < shape.num_parts:
        row = shape.row_bytes(part)
        if row * num_tokens > max_bytes:
            step = max(1, max_bytes // row)
            for start in range(0, num_tokens, step):
                stop = min(start + step, num_tokens)
                yield Chunk(part, part + 1, start, stop, row * (stop - start))
            part += 1
            continue
        first, size = part, 0
        while part < shape.num_parts and size + shape.row_bytes(part) * num_tokens <= max_bytes:
            size += shape.row_bytes(part) * num_tokens
            part += 1
        yield Chunk(first, part, 0, num_tokens, size)


def header_bytes(shape: KVShape, num_tokens: int, about: Mapping[str, str]) -> bytes:
    """What stands before the data; `about` says whose weights made it."""
    header = json.dumps({"__metadata__": dict(about), **shape.tensors(num_tokens)}).encode()
    header += b" " * (-len(header) % 8)  # so that the data is aligned
    return len(header).to_bytes(8, "little") + header


def check_header(header: bytes, shape: KVShape, num_tokens: int) -> None:
    """
    Args:
        header: without its length.

    Raises:
        ValueError: it is none, or not that of so many tokens of this shape; says why.
    """
    found = json.loads(header)  # a JSONDecodeError is a ValueError
    if not isinstance(found, dict):
        raise ValueError("the header is no object")
    for name, expected in shape.tensors(num_tokens).items():
        if found.get(name) != expected:
            raise ValueError(f"tensor {name} is {found.get(name)}, not {expected}")


def header_size(prefix: bytes, num_file_bytes: int) -> int:
    """The length of the header.

    Args:
        prefix: the first 8 bytes.

    Raises:
        ValueError: the file cannot have such a header.
    """
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > min(_MAX_HEADER_BYTES, num_file_bytes):
        raise ValueError("it does not begin with a header")
    return size
