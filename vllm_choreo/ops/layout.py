# SPDX-License-Identifier: Apache-2.0
"""KV cache layouts that the operations read and write, and their detection.

The cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` to vLLM in the first two of
them, with any strides of blocks, heads and slots. The contents of a (block, head) differ::

    KEYS_TRANSPOSED   K transposed [head_size, block_size], then V [block_size, head_size]
    SIDE_BY_SIDE      [block_size, K and V of a token]
    LATENT            [block_size, K of a token], K = [V, rotated dims]

A latent cache (MLA) is ``[num_blocks, 1, block_size, head_size]``: the first ``value_size`` columns
of a key are the value, and rotation begins behind them.

Source: vLLM 0.32.0, CPU attention (instruction sets ``vec`` and ``vec16``, float32, bfloat16 and,
in bytes, 8 bits); its FlashAttention and Triton attention backends; its MLA backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch

from vllm_choreo.ops.quantized import QuantizedKV

WriteFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Layout(Enum):
    """Order of keys and values in a (block, head) of the cache; the value says it in words."""

    KEYS_TRANSPOSED = "keys transposed, then values"
    SIDE_BY_SIDE = "key and value of a token side by side"
    LATENT = "one row a token, a key that begins with the value"


class UnsupportedLayoutError(RuntimeError):
    """The engine stores keys and values in a layout that these operations cannot read."""


def _halves(kv_cache: torch.Tensor) -> torch.Tensor:
    """View ``[num_blocks, num_kv_heads, 2, block_size * head_size]``: keys, then values."""
    num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
    return kv_cache.view(num_blocks, num_kv_heads, 2, block_size * double_head // 2)


def head_sizes(
    kv_cache: torch.Tensor, layout: Layout, value_size: int | None = None
) -> tuple[int, int]:
    """Sizes of a key and a value.

    Args:
        value_size: size of a value in a latent cache, whose shape does not tell.

    Raises:
        ValueError: a latent cache without a size of values that fits, or another one with such.
    """
    width = kv_cache.shape[-1]
    if (layout is Layout.LATENT) != (value_size is not None):
        raise ValueError(
            f"value_size is {value_size} and the layout {layout.value!r}: caches of "
            f"{Layout.LATENT.value!r} need one, others have none"
        )
    if value_size is None:
        return width // 2, width // 2
    if not 0 < value_size <= width:
        raise ValueError(f"value_size is {value_size}; keys of {width} columns begin with values")
    return width, value_size


def key_view(kv_cache: torch.Tensor, layout: Layout = Layout.KEYS_TRANSPOSED) -> torch.Tensor:
    """View of the keys, ``[num_blocks, num_kv_heads, block_size, head_size]``."""
    num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
    if layout is Layout.LATENT:
        return kv_cache
    if layout is Layout.SIDE_BY_SIDE:
        return kv_cache[..., : double_head // 2]
    shape = (num_blocks, num_kv_heads, double_head // 2, block_size)
    return _halves(kv_cache)[:, :, 0].view(shape).transpose(2, 3)


def value_view(
    kv_cache: torch.Tensor,
    layout: Layout = Layout.KEYS_TRANSPOSED,
    value_size: int | None = None,
) -> torch.Tensor:
    """View of the values, ``[num_blocks, num_kv_heads, block_size, head_size or value_size]``."""
    num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
    if layout is Layout.LATENT:
        return kv_cache[..., : head_sizes(kv_cache, layout, value_size)[1]]
    if layout is Layout.SIDE_BY_SIDE:
        return kv_cache[..., double_head // 2 :]
    return _halves(kv_cache)[:, :, 1].view(num_blocks, num_kv_heads, block_size, double_head // 2)


def read_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: Layout = Layout.KEYS_TRANSPOSED,
    value_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at ``slots`` (block * block_size + offset, int64 ``[n]``).

    Returns:
        Two copies, ``[n, num_kv_heads, head_size]`` and ``[n, num_kv_heads, value_size]``.
    """
    blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    keys, values = key_view(kv_cache, layout), value_view(kv_cache, layout, value_size)
    return keys[blocks, :, offsets], values[blocks, :, offsets]


def write_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout = Layout.KEYS_TRANSPOSED,
) -> None:
    """Store ``keys`` and ``values`` (each ``[n, num_kv_heads, its size]``) at ``slots``."""
    blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    value_size = values.shape[-1] if layout is Layout.LATENT else None
    key_view(kv_cache, layout)[blocks, :, offsets] = keys
    value_view(kv_cache, layout, value_size)[blocks, :, offsets] = values


def detect_layout(
    write_fn: WriteFn,
    *,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    readable: Sequence[Layout] = (Layout.KEYS_TRANSPOSED,),
    quantized: QuantizedKV | None = None,
    value_size: int | None = None,
) -> Layout:
    """Find out by experiment in which layout the engine writes.

    Args:
        write_fn: called as ``write_fn(keys, values, kv_cache, slot_mapping)`` with keys and
            values ``[n, num_kv_heads, head_size]``, a zeroed cache
            ``[4, num_kv_heads, block_size, 2 * head_size]`` and int64 slots ``[n]``; it must
            store them the way the engine does. With a ``value_size`` values are the beginnings
            of the keys, and the last dim of the cache is ``head_size``.
        num_kv_heads, head_size, block_size, device: properties of the engine's cache.
        dtype: dtype of the keys and values that are written.
        readable: layouts that the implementation in use reads.
        quantized: meaning of the bytes of a cache in 8 bits; None: it is of `dtype`.
        value_size: numbers of a value in a latent cache; None: it is no such cache.

    Raises:
        UnsupportedLayoutError: something else was found; the message names it and the way out.
    """
    shape = (4, num_kv_heads, block_size, 2 * head_size if value_size is None else head_size)
    stored_dtype = torch.uint8 if quantized else dtype
    kv_cache = torch.zeros(shape, dtype=stored_dtype, device=device)
    # Whole blocks and a partial one, not in order.
    slots = torch.cat([torch.arange(block_size) + 2 * block_size, torch.arange(3) + block_size])
    numel = slots.numel() * num_kv_heads * head_size
    numbers, keys, values = _distinct(numel, dtype, quantized)
    keys, values = (part.view(-1, num_kv_heads, head_size) for part in (keys, values))
    given = [part.to(device).view(keys.shape) for part in numbers]
    if value_size is not None:
        values, given[1] = keys[..., :value_size], given[0][..., :value_size]
    write_fn(given[0], given[1], kv_cache, slots.to(device))
    found = kv_cache.cpu()
    expected = torch.zeros(shape, dtype=stored_dtype)
    for layout in readable:
        write_kv(expected.zero_(), slots, keys, values, layout)
        if torch.equal(found, expected):
            return layout
    names = " or ".join(f"'{layout.value}'" for layout in readable)
    raise UnsupportedLayoutError(
        f"the KV cache holds {_describe(found, expected, slots, keys)}, but choreography reads "
        f"{names} ({dtype}, head size {head_size}, block size {block_size}). "
        + _way_out(kv_cache.dtype)
    )


def _distinct(
    numel: int, dtype: torch.dtype, quantized: QuantizedKV | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Keys and values to write, `[numel]` each, and what is then stored of them.

    They tell places apart: small integers, exact in any dtype. In 8 bits these are powers of two
    with a sign, in an order that no other layout repeats; a little more than that, of which nothing
    is left, whether the engine rounds or leaves digits out.
    """
    order = torch.arange(2 * numel) * 7919 % 251
    if quantized is None:
        keys, values = (order + 1).to(dtype).view(2, numel)
        return (keys.clone(), values.clone()), keys, values
    powers = 2.0 ** (order % 9 - 4) * (1 - order % 2 * 2)
    scales = torch.tensor([[quantized.key_scale], [quantized.value_scale]])
    written = (powers.view(2, numel) * scales * (1 + 1 / 32)).to(dtype)
    keys, values = powers.to(quantized.dtype).view(torch.uint8).view(2, numel)
    return (written[0], written[1]), keys, values


def _describe(
    found: torch.Tensor, expected: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor
) -> str:
    """Name what ``found`` looks like, from the plainest guess to the vaguest."""
    block_size = found.shape[2]
    if not bool(found.any()):
        return "nothing (the write function stored no keys or values)"
    if found.shape[-1] == keys.shape[-1]:
        return "no rows of the latent"
    plain = _halves(found)[:, :, 0].view_as(value_view(found))
    if torch.equal(plain[slots // block_size, :, slots % block_size], keys):
        return "keys row by row [block_size, head_size], not transposed"
    interleaved = found[slots // block_size, :, slots % block_size]
    if torch.equal(interleaved[..., : keys.shape[-1]], keys):
        return Layout.SIDE_BY_SIDE.value
    if torch.equal(found.flatten().sort()[0], expected.flatten().sort()[0]):
        return "the right numbers in another order (packed into tiles, as AMX kernels do)"
    return "other numbers than were written (a quantized or scaled cache)"


def _way_out(dtype: torch.dtype) -> str:
    """Text that says how to start the engine with a layout that can be read."""
    if dtype == torch.bfloat16:
        return (
            "On CPUs with AMX vLLM packs bfloat16 keys into tiles: start the engine with "
            "dtype='float32'."
        )
    return "Start the engine with kv_cache_dtype='auto' on an x86 CPU, and vLLM 0.32.0."
