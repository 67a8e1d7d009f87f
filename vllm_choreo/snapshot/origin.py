# SPDX-License-Identifier: Apache-2.0
"""Origin or target of messages: a session, an engine, and workers that share the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_choreo.errors import KeptError
from vllm_choreo.snapshot.tensors import Chunk, KVShape


@dataclass(frozen=True)
class Origin:
    """Session and engine that messages come from or go to.

    Attributes:
        session, tenant: session and tenant of the messages; `tenant` as a manifest names it.
        signature: signature of the engine, see `signature.py`.
        num_ranks: workers that share the heads.
        num_heads: heads that have keys, in all workers together.
        vocab_size: number of tokens that the model knows.
    """

    session: str
    tenant: str
    signature: Mapping[str, Any]
    num_ranks: int
    num_heads: int
    vocab_size: int = 2**62


def _stride(origin: Origin) -> int:
    """Number of workers that have the same heads: above 1 where workers outnumber heads."""
    return max(1, origin.num_ranks // origin.num_heads)


def all_heads(shapes: Sequence[Mapping[str, Any]], origin: Origin) -> list[list[int]]:
    """`[num_kv_heads, key_size, value_size]` of each layer, in all workers together."""
    apart = shapes[:: _stride(origin)]
    return [
        [sum(heads for heads, *_ in sizes), *sizes[0][1:]]
        for sizes in zip(*(shape["layers"] for shape in apart), strict=True)
    ]


def shape_of(shapes: Sequence[Mapping[str, Any]], origin: Origin) -> KVShape:
    """Shape of keys and values, from what each worker tells.

    Raises:
        KeptError: as `KVShape.of`, or workers share the states of a model.
    """
    hidden_dtype, hidden_size = shapes[0]["hidden"]
    if shapes[0]["states"] and len(shapes) > 1:
        raise KeptError(
            "workers share the states of this model, of which files hold whole ones: save recipes "
            "alone (encodings=False)",
            parameter="tensor_parallel_size",
            value=len(shapes),
        )
    return KVShape.of(
        shapes[0]["dtype"],
        all_heads(shapes, origin),
        (hidden_dtype, int(hidden_size)),
        shapes[0]["scales"],  # of a layer, so of all workers
        shapes[0]["states"],
    )


def by_layer(of_groups: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Numbers of KV cache groups, layer by layer.

    Args:
        groups: group of each layer.
    """
    return [of_groups[group] for group in groups]


def concat_heads(found: Sequence[bytes], chunk: Chunk, shape: KVShape, origin: Origin) -> bytes:
    """Concatenate the heads of a chunk, of which each worker has some, token by token."""
    apart = found[:: _stride(origin)]
    if len(apart) == 1:
        return apart[0]
    num_tokens, parts, starts = chunk.stop - chunk.start, [], [0] * len(apart)
    for part in range(chunk.first, chunk.last):
        row = shape.row_bytes(part) // len(apart)
        rows = []
        for rank, data in enumerate(apart):
            stop = starts[rank] + row * num_tokens
            rows.append(np.frombuffer(data[starts[rank] : stop], np.uint8).reshape(num_tokens, row))
            starts[rank] = stop
        parts.append(np.concatenate(rows, axis=1).tobytes())
    return b"".join(parts)
