# SPDX-License-Identifier: Apache-2.0
"""Attention over the tiles of a batch (see ``vllm_choreo.ops.tiles``), and the merge.

Softmax with a running maximum follows Milakov, Gimelshein, "Online normalizer calculation for
softmax", 2018; tiles as in Dao et al., "FlashAttention", 2022. Exponentials are of base two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pair(dims, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """The dim with which each dim rotates, the index of their angle, and the sine's sign.

    Dims are counted from the first that rotates.
    """
    half: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        is_first = dims < half
        other = tl.where(is_first, dims + half, dims - half)
        angle = tl.where(is_first, dims, dims - half)
    else:
        is_first = dims % 2 == 0
        other = tl.where(is_first, dims + 1, dims - 1)
        angle = dims // 2
    return other, angle, tl.where(is_first, -1.0, 1.0)


@triton.jit
def _load_queries(rows_ptr, has_query, dims, HEAD_SIZE: tl.constexpr):
    inside = has_query[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(rows_ptr[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _rotate(queries, rows_ptr, has_query, cos_sin_ptr, span, dims,
            ROTARY_OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr,
            IS_NEOX: tl.constexpr):  # fmt: skip
    """Queries [rows, dims] turned by the delta of each row's span."""
    rotary = dims - ROTARY_OFFSET
    other, angle, sign = _pair(rotary, ROTARY_DIM, IS_NEOX)
    turns = has_query[:, None] & ((rotary >= 0) & (rotary < ROTARY_DIM))[None, :]
    partner = tl.load(rows_ptr[:, None] + ROTARY_OFFSET + other[None, :], mask=turns, other=0.0)
    at = cos_sin_ptr + span[:, None] * ROTARY_DIM + angle[None, :]
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + ROTARY_DIM // 2, mask=turns, other=0.0)
    turned = queries.to(tl.float32) * cos + partner.to(tl.float32) * sin * sign[None, :]
    return turned.to(queries.dtype)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """The matrix product in float32. The interpreter has none of bfloat16: it widens first."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _decode(stored, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Keys or values of `dtype`, exactly, of what was loaded.

    Bytes are made float16 that lacks bits of the fraction: by shifts, which every GPU has. With
    FORMAT 1, `float8_e4m3fn`, exponents have another bias, so that this gives 1/256 of the numbers;
    FORMAT 2 is `float8_e5m2`, 0 stands for no bytes at all.
    """
    if FORMAT == 0:
        return stored
    bits = stored.to(tl.uint16)
    if FORMAT == 1:
        # A carry out of exponent and fraction, 0x7f + 1, makes float16's NaN.
        carry = (((bits & 0x7F) + 1) & 0x80) << 7
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7) | carry
    else:
        half = bits << 8
    return half.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _attend(accumulator, maximum, total, queries, last_visible, distance, slopes,
            key_ptr, key_block, key_slot, key_dim, value_ptr, value_block, value_slot, value_dim,
            table_ptr, first_slot, begin, end, dims, value_dims, scale, softcap,
            window, inverse_temperature, IS_OWN: tl.constexpr, HEAD_SIZE: tl.constexpr,
            VALUE_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
            HAS_WINDOW: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
            CHUNK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
            FORMAT: tl.constexpr):  # fmt: skip
    """Take tokens begin .. end - 1, from `first_slot` on, into the running softmax of each row.

    `distance` is the seen position of token 0 minus the position of the row's query; of an own
    span a row sees the tokens up to `last_visible`, in a window those beyond `-window`. Scores are
    multiplied by `inverse_temperature`.
    """
    is_dim, is_value_dim = dims < HEAD_SIZE, value_dims < VALUE_SIZE
    for start in range(begin, end, CHUNK):
        token = start + tl.arange(0, CHUNK)
        is_token = token < end
        slot = first_slot + token
        block = tl.load(table_ptr + slot // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        offset = slot % BLOCK_SIZE
        keys = tl.load(
            key_ptr + (block * key_block + offset * key_slot)[None, :] + dims[:, None] * key_dim,
            mask=is_dim[:, None] & is_token[None, :], other=0,
        )  # fmt: skip
        keys = _decode(keys, FORMAT, queries.dtype)
        scores = _dot(queries, keys, PRECISION, WIDEN) * scale
        if HAS_SOFTCAP:  # tanh by the logistic function
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if HAS_ALIBI:
            scores += slopes[:, None] * (distance[:, None] + token[None, :]).to(tl.float32)
        if HAS_TEMPERATURE:
            scores = scores * inverse_temperature
        visible = is_token[None, :]
        if IS_OWN:
            visible = visible & (token[None, :] <= last_visible[:, None])
        if HAS_WINDOW:
            visible = visible & (distance[:, None] + token[None, :] > -window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum; any number serves.
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(maximum - safe)
        values = tl.load(
            value_ptr + (block * value_block + offset * value_slot)[:, None]
            + value_dims[None, :] * value_dim,
            mask=is_token[:, None] & is_value_dim[None, :], other=0,
        )  # fmt: skip
        values = _decode(values, FORMAT, queries.dtype)
        accumulator = accumulator * shrink[:, None]
        accumulator += _dot(weights.to(values.dtype), values, PRECISION, WIDEN)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_tiles(
    query_ptr, query_token, query_head,
    key_ptr, key_block, key_head, key_slot, key_dim,
    value_ptr, value_block, value_head, value_slot, value_dim,
    output_ptr, output_token, output_head, partial_output_ptr, partial_lse_ptr,
    table_ptr, table_row, cos_sin_ptr, slopes_ptr, sinks_ptr,
    tile_query_ptr, tile_request_ptr, tile_column_ptr, items_ptr,
    segments_ptr, read_span_ptr, read_position_ptr,
    own_first_slot_ptr, own_tokens_ptr, own_position_ptr, query_end_ptr, temperature_ptr,
    scale, softcap, window, value_scale,
    NUM_ROWS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED_VALUE_SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One item of one KV head. Names without a suffix are strides, in elements."""
    NUM_SLOTS: tl.constexpr = NUM_ROWS // GROUP_HEADS
    item_ptr = items_ptr + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    tile = tl.load(item_ptr)
    first_segment, end_segment = tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    own_request, share = tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    num_shares, first_partial = tl.load(item_ptr + 5), tl.load(item_ptr + 6)

    rows = tl.arange(0, NUM_ROWS)
    slot = rows // GROUP_HEADS
    head = kv_head * GROUP_HEADS + rows % GROUP_HEADS
    is_row = slot < NUM_SLOTS
    entry = tile * NUM_SLOTS + slot
    query = tl.load(tile_query_ptr + entry, mask=is_row, other=-1).to(tl.int64)
    has_query = query >= 0
    request = tl.load(tile_request_ptr + entry, mask=has_query, other=0)
    column = tl.load(tile_column_ptr + entry, mask=has_query, other=0)
    dims, value_dims = tl.arange(0, PADDED_HEAD_SIZE), tl.arange(0, PADDED_VALUE_SIZE)
    rows_ptr = query_ptr + query * query_token + head * query_head
    queries = _load_queries(rows_ptr, has_query, dims, HEAD_SIZE)

    # Index of a row's query within its own span.
    num_own = tl.load(own_tokens_ptr + request, mask=has_query, other=0)
    query_end = tl.load(query_end_ptr + request, mask=has_query, other=0)
    index = num_own - query_end + query.to(tl.int32)
    position = index
    slopes = tl.zeros([NUM_ROWS], tl.float32)
    if HAS_ALIBI or HAS_WINDOW:
        position += tl.load(own_position_ptr + request, mask=has_query, other=0)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=has_query, other=0.0)
    maximum = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    accumulator = tl.zeros([NUM_ROWS, PADDED_VALUE_SIZE], tl.float32)
    key_ptr += kv_head.to(tl.int64) * key_head
    value_ptr += kv_head.to(tl.int64) * value_head

    inverse_temperature = 1.0
    if HAS_TEMPERATURE:  # an item of chosen spans is of one request
        of_tile = tl.load(tile_request_ptr + tile * NUM_SLOTS)
        if tl.load(item_ptr + 7) != 0:
            inverse_temperature = 1.0 / tl.load(temperature_ptr + of_tile)

    for segment in range(first_segment, end_segment):
        segment_ptr = segments_ptr + segment * 5
        read = tl.load(segment_ptr) + column
        blocks_ptr = table_ptr + tl.load(segment_ptr + 1).to(tl.int64) * table_row
        turned = queries
        if ROTARY_DIM > 0:
            span = tl.load(read_span_ptr + read, mask=has_query, other=0)
            turned = _rotate(queries, rows_ptr, has_query, cos_sin_ptr, span, dims,
                             ROTARY_OFFSET, ROTARY_DIM, IS_NEOX)  # fmt: skip
        distance = position
        if HAS_ALIBI or HAS_WINDOW:
            seen = tl.load(read_position_ptr + read, mask=has_query, other=0)
            distance = seen + tl.load(segment_ptr + 4) - position
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, turned, index, distance, slopes,
            key_ptr, key_block, key_slot, key_dim, value_ptr, value_block, value_slot, value_dim,
            blocks_ptr, tl.load(segment_ptr + 2), 0, tl.load(segment_ptr + 3), dims, value_dims,
            scale, softcap, window, inverse_temperature, False, HEAD_SIZE, VALUE_SIZE, HAS_SOFTCAP,
            HAS_ALIBI, HAS_WINDOW, HAS_TEMPERATURE, BLOCK_SIZE, CHUNK, PRECISION, WIDEN, FORMAT,
        )  # fmt: skip

    if own_request >= 0:
        # What the tile's queries see, in equal shares of whole chunks.
        num_visible = tl.max(tl.where(has_query, index, -1), 0) + 1
        first_visible = 0
        if HAS_WINDOW:
            first = tl.min(tl.where(has_query, index, num_visible), 0)
            first_visible = tl.maximum(first + 1 - window, 0)
        per_share = tl.cdiv(tl.cdiv(num_visible - first_visible, num_shares), CHUNK) * CHUNK
        begin = first_visible + share * per_share
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, queries, index, -index, slopes,
            key_ptr, key_block, key_slot, key_dim, value_ptr, value_block, value_slot, value_dim,
            table_ptr + own_request.to(tl.int64) * table_row,
            tl.load(own_first_slot_ptr + own_request), begin,
            tl.minimum(begin + per_share, num_visible), dims, value_dims, scale, softcap,
            window, 1.0, True, HEAD_SIZE, VALUE_SIZE, HAS_SOFTCAP, HAS_ALIBI, HAS_WINDOW, False,
            BLOCK_SIZE, CHUNK, PRECISION, WIDEN, FORMAT,
        )  # fmt: skip

    if HAS_SINKS and first_partial < 0:
        sink = tl.load(sinks_ptr + head, mask=has_query, other=0.0) * LOG2_E
        total += tl.where(has_query, tl.exp2(sink - maximum), 0.0)
    # A row that saw nothing has an output of zeros and a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = accumulator / total[:, None]
    if FORMAT != 0:
        result = result * value_scale
    is_stored = has_query[:, None] & (value_dims < VALUE_SIZE)[None, :]
    if first_partial < 0:
        at = output_ptr + query * output_token + head * output_head
        tl.store(
            at[:, None] + value_dims[None, :],
            result.to(output_ptr.dtype.element_ty),
            mask=is_stored,
        )
    else:
        num_heads = tl.num_programs(1) * GROUP_HEADS
        partial = (first_partial + slot).to(tl.int64) * num_heads + head
        tl.store(partial_output_ptr + partial[:, None] * VALUE_SIZE + value_dims[None, :], result,
                 mask=is_stored)  # fmt: skip
        tl.store(partial_lse_ptr + partial, maximum + tl.log2(total), mask=has_query)


@triton.jit
def merge_partials(
    output_ptr, output_token, output_head, partial_output_ptr, partial_lse_ptr,
    merged_query_ptr, partial_start_ptr, partial_ptr, sinks_ptr,
    merged_request_ptr, merged_chosen_ptr, factor_ptr,
    VALUE_SIZE: tl.constexpr, PADDED_VALUE_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """The output of one head of one query from its partial results.

    The first `merged_chosen` of them count by other weights: their common log-sum-exp is multiplied
    by the factor of the request.
    """
    merged, head = tl.program_id(0), tl.program_id(1)
    query = tl.load(merged_query_ptr + merged).to(tl.int64)
    begin, end = tl.load(partial_start_ptr + merged), tl.load(partial_start_ptr + merged + 1)
    dims = tl.arange(0, PADDED_VALUE_SIZE)
    is_dim = dims < VALUE_SIZE
    shift = 0.0
    end_chosen = begin
    if HAS_TEMPERATURE:
        end_chosen += tl.load(merged_chosen_ptr + merged)
        highest = float("-inf")
        for i in range(begin, end_chosen):
            partial = tl.load(partial_ptr + i).to(tl.int64) * tl.num_programs(1) + head
            highest = tl.maximum(highest, tl.load(partial_lse_ptr + partial))
        if highest > float("-inf"):
            of_chosen = 0.0
            for i in range(begin, end_chosen):
                partial = tl.load(partial_ptr + i).to(tl.int64) * tl.num_programs(1) + head
                of_chosen += tl.exp2(tl.load(partial_lse_ptr + partial) - highest)
            factor = tl.load(factor_ptr + tl.load(merged_request_ptr + merged))
            shift = (factor - 1.0) * (highest + tl.log2(of_chosen))
    maximum = float("-inf")
    for i in range(begin, end):
        partial = tl.load(partial_ptr + i).to(tl.int64) * tl.num_programs(1) + head
        lse = tl.load(partial_lse_ptr + partial) + tl.where(i < end_chosen, shift, 0.0)
        maximum = tl.maximum(maximum, lse)
    total = 0.0
    if HAS_SINKS:  # an output of zero
        total = tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - maximum)
    result = tl.zeros([PADDED_VALUE_SIZE], tl.float32)
    for i in range(begin, end):
        at = tl.load(partial_ptr + i).to(tl.int64) * tl.num_programs(1) + head
        lse = tl.load(partial_lse_ptr + at) + tl.where(i < end_chosen, shift, 0.0)
        weight = tl.exp2(lse - maximum)
        total += weight
        result += weight * tl.load(
            partial_output_ptr + at * VALUE_SIZE + dims, mask=is_dim, other=0.0
        )
    at = output_ptr + query * output_token + head * output_head
    tl.store(at + dims, (result / total).to(output_ptr.dtype.element_ty), mask=is_dim)
