# SPDX-License-Identifier: Apache-2.0
"""Rotation of the keys of whole blocks, in place or into other blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_choreo.ops.layout import Layout, key_view, value_view


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    layout: Layout,
    value_size: int | None = None,
) -> None:
    """Run ``vllm_choreo.ops.reposition_keys``; all tensors lie on the cache's device."""
    num_moves, rotary_dim = cos_sin.shape
    if num_moves == 0:
        return
    keys, values = key_view(kv_cache, layout), value_view(kv_cache, layout, value_size)
    _, num_kv_heads, block_size, head_size = keys.shape
    _move_block[(num_moves, num_kv_heads)](
        keys, *keys.stride(), values, *values.stride(), src_blocks, dst_blocks, cos_sin,
        BLOCK_SIZE=block_size,
        PADDED_BLOCK_SIZE=triton.next_power_of_2(block_size),
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        ROTARY_OFFSET=value_size or 0,
        HALF=rotary_dim // 2,
        PADDED_HALF=triton.next_power_of_2(max(rotary_dim // 2, 1)),
        IS_NEOX=is_neox,
    )  # fmt: skip


@triton.jit
def _move_block(
    key_ptr, key_block, key_head, key_slot, key_dim,
    value_ptr, value_block, value_head, value_slot, value_dim,
    src_ptr, dst_ptr, cos_sin_ptr,
    BLOCK_SIZE: tl.constexpr, PADDED_BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, PADDED_HEAD_SIZE: tl.constexpr, ROTARY_OFFSET: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """One KV head of one block. Names without a suffix are strides, in elements."""
    move, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    src, dst = tl.load(src_ptr + move).to(tl.int64), tl.load(dst_ptr + move).to(tl.int64)
    slots = tl.arange(0, PADDED_BLOCK_SIZE)
    is_slot = slots < BLOCK_SIZE

    at_key = key_ptr + head * key_head + slots[:, None] * key_slot
    angles = tl.arange(0, PADDED_HALF)
    is_turned = is_slot[:, None] & (angles < HALF)[None, :]
    if IS_NEOX:
        first_dims, second_dims = angles, angles + HALF
    else:
        first_dims, second_dims = 2 * angles, 2 * angles + 1
    at_first = at_key + (ROTARY_OFFSET + first_dims)[None, :] * key_dim
    at_second = at_key + (ROTARY_OFFSET + second_dims)[None, :] * key_dim
    first = tl.load(at_first + src * key_block, mask=is_turned, other=0.0)
    second = tl.load(at_second + src * key_block, mask=is_turned, other=0.0)
    at_angle = cos_sin_ptr + move * 2 * HALF + angles
    cos = tl.load(at_angle, mask=angles < HALF, other=1.0)[None, :]
    sin = tl.load(at_angle + HALF, mask=angles < HALF, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    # In place, what one thread stores another may still have to load.
    tl.debug_barrier()
    tl.store(at_first + dst * key_block, (a * cos - b * sin).to(first.dtype), mask=is_turned)
    tl.store(at_second + dst * key_block, (b * cos + a * sin).to(first.dtype), mask=is_turned)

    if src != dst:
        dims = tl.arange(0, PADDED_HEAD_SIZE)
        is_rotated = (dims >= ROTARY_OFFSET) & (dims < ROTARY_OFFSET + 2 * HALF)
        is_kept = is_slot[:, None] & (~is_rotated & (dims < HEAD_SIZE))[None, :]
        at_kept = at_key + dims[None, :] * key_dim
        kept = tl.load(at_kept + src * key_block, mask=is_kept, other=0.0)
        tl.store(at_kept + dst * key_block, kept, mask=is_kept)
        at_value = (
            value_ptr + head * value_head + slots[:, None] * value_slot + dims[None, :] * value_dim
        )
        # Values of a latent cache are the beginnings of the keys, which are copied already.
        is_value = is_slot[:, None] & (dims < HEAD_SIZE)[None, :] & (ROTARY_OFFSET == 0)
        copied = tl.load(at_value + src * value_block, mask=is_value, other=0.0)
        tl.store(at_value + dst * value_block, copied, mask=is_value)
