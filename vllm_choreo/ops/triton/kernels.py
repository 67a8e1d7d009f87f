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
def _pair(dims, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, RUN: tl.constexpr):
    """The dim with which each dim rotates, the index of their angle, and the sine's sign.

    Dims are counted from the first that rotates. Runs of `RUN` dims have partners side by side.
    """
    half: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        is_first = dims < half
        other = tl.where(is_first, dims + half, dims - half)
        angle = tl.where(is_first, dims, dims - half)
        if RUN > 1:
            other = tl.max_contiguous(tl.multiple_of(other, RUN), RUN)
            angle = tl.max_contiguous(tl.multiple_of(angle, RUN), RUN)
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
def _load_turned(rows_ptr, has_query, cos_sin_ptr, span, dims, HEAD_SIZE: tl.constexpr,
                 ROTARY_OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
                 RUN: tl.constexpr):  # fmt: skip
    """Queries [rows, dims] turned by the delta of each row's span.

    They are loaded for each span: kept, they would take registers in the loops over tokens. And
    one after the other, for all four factors at once are too many registers.
    """
    rotary = dims - ROTARY_OFFSET
    other, angle, sign = _pair(rotary, ROTARY_DIM, IS_NEOX, RUN)
    turns = has_query[:, None] & ((rotary >= 0) & (rotary < ROTARY_DIM))[None, :]
    at = cos_sin_ptr + span[:, None] * ROTARY_DIM + angle[None, :]
    queries = _load_queries(rows_ptr, has_query, dims, HEAD_SIZE)
    turned = queries.to(tl.float32) * tl.load(at, mask=turns, other=1.0)
    partner = tl.load(rows_ptr[:, None] + ROTARY_OFFSET + other[None, :], mask=turns, other=0.0)
    sin = tl.load(at + ROTARY_DIM // 2, mask=turns, other=0.0)
    turned += partner.to(tl.float32) * sin * sign[None, :]
    return turned.to(queries.dtype)


@triton.jit(do_not_specialize=["num_copies"])
def copy_queries(
    query_ptr, query_token, query_head, copy_ptr, copied_query_ptr, copied_span_ptr, num_copies,
    cos_sin_ptr,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """One head of some copies of queries, `[num_copies, NUM_HEADS, HEAD_SIZE]`, each turned by the
    delta of its span.
    """
    row, head = tl.program_id(0) * NUM_ROWS + tl.arange(0, NUM_ROWS), tl.program_id(1)
    is_row, dims = row < num_copies, tl.arange(0, PADDED_HEAD_SIZE)
    query = tl.load(copied_query_ptr + row, mask=is_row, other=0).to(tl.int64)
    rows_ptr = query_ptr + query * query_token + head * query_head
    if ROTARY_DIM > 0:
        span = tl.load(copied_span_ptr + row, mask=is_row, other=0)
        copies = _load_turned(rows_ptr, is_row, cos_sin_ptr, span, dims, HEAD_SIZE, 0, ROTARY_DIM,
                              IS_NEOX, RUN)  # fmt: skip
    else:
        copies = _load_queries(rows_ptr, is_row, dims, HEAD_SIZE)
    at = copy_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(at, copies, mask=is_row[:, None] & (dims < HEAD_SIZE)[None, :])


@triton.jit
def _find_rows(tile_query_ptr, query_ptr, query_token, query_head, entry, is_row, head):
    """The query of each row, whether there is one, and where it lies."""
    query = tl.load(tile_query_ptr + entry, mask=is_row, other=-1).to(tl.int64)
    return query, query >= 0, query_ptr + query * query_token + head * query_head


@triton.jit
def _own_index(own_tokens_ptr, query_end_ptr, query, request, has_query):
    """Index of each row's query within its own span."""
    num_own = tl.load(own_tokens_ptr + request, mask=has_query, other=0)
    query_end = tl.load(query_end_ptr + request, mask=has_query, other=0)
    return num_own - query_end + query.to(tl.int32)


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
def _load_values(at, is_token, value_dims, VALUE_SIZE: tl.constexpr):
    """Values of a chunk; zeros beyond its end.

    What lies there may be no number, of which no weight makes zero.
    """
    is_value = is_token[:, None]
    if value_dims.shape[0] > VALUE_SIZE:
        is_value = is_value & (value_dims < VALUE_SIZE)[None, :]
    return tl.load(at, mask=is_value, other=0)


@triton.jit
def _attend(accumulator, maximum, total, queries, latents, last_visible, distance, slopes, key_ptr,
            value_ptr, table_ptr, first_slot, begin, end, dims, value_dims, scale, softcap,
            window, inverse_temperature, IS_OWN: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
            KEY_SLOT: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_SLOT: tl.constexpr,
            VALUE_DIM: tl.constexpr, HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
            IS_LATENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
            HAS_WINDOW: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
            CHUNK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
            FORMAT: tl.constexpr):  # fmt: skip
    """Take tokens begin .. end - 1, from `first_slot` on, into the running softmax of each row.

    `distance` is the seen position of token 0 minus the position of the row's query; of an own
    span a row sees the tokens up to `last_visible`, in a window those beyond `-window`. Scores are
    multiplied by `inverse_temperature`. `scale`, `softcap` and `slopes` are such that scores are
    exponents of two; with a soft cap `scale` is twice that of the quotient by the cap.

    Of a latent cache `dims` are those behind the value, and `queries` has these; the others are
    `latents`: so a value is loaded once, as a part of its key and by itself.
    """
    tokens = tl.arange(0, CHUNK)
    # Unsigned, for then a division by a power of two is a shift.
    last_block = (first_slot + end - 1).to(tl.uint32) // BLOCK_SIZE
    offset = ((first_slot + begin + tokens).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
    # Keys are loaded as values are, [tokens, dims], and share the addresses of their blocks.
    keys_at = key_ptr + (offset * KEY_SLOT)[:, None] + (dims * KEY_DIM)[None, :]
    values_at = value_ptr + (offset * VALUE_SLOT)[:, None] + (value_dims * VALUE_DIM)[None, :]
    for start in range(begin, end, CHUNK):
        token = start + tokens
        slot = (first_slot + token).to(tl.uint32)
        # Tokens beyond the end are found in its block: there is one for every address.
        block = tl.load(table_ptr + tl.minimum(slot // BLOCK_SIZE, last_block)).to(tl.int64)
        if CHUNK % BLOCK_SIZE != 0:
            offset = (slot % BLOCK_SIZE).to(tl.int32)
            keys_at = key_ptr + (offset * KEY_SLOT)[:, None] + (dims * KEY_DIM)[None, :]
            values_at = (
                value_ptr + (offset * VALUE_SLOT)[:, None] + (value_dims * VALUE_DIM)[None, :]
            )
        of_block = (block * BLOCK_STRIDE)[:, None]
        if dims.shape[0] == (HEAD_SIZE - VALUE_SIZE if IS_LATENT else HEAD_SIZE):
            keys = tl.load(keys_at + of_block)
        else:
            keys = tl.load(keys_at + of_block, mask=(dims < HEAD_SIZE)[None, :], other=0)
        keys = _decode(keys, FORMAT, queries.dtype)
        scores = _dot(queries, tl.trans(keys), PRECISION, WIDEN)
        is_token = token < end
        if IS_LATENT:
            values = _load_values(values_at + of_block, is_token, value_dims, VALUE_SIZE)
            scores += _dot(latents, tl.trans(values), PRECISION, WIDEN)
        scores = scores * scale
        if HAS_SOFTCAP:  # tanh by the logistic function
            scores = softcap * (2.0 * tl.sigmoid(scores) - 1.0)
        if HAS_ALIBI:
            scores += slopes[:, None] * (distance[:, None] + token[None, :]).to(tl.float32)
        if HAS_TEMPERATURE:
            scores = scores * inverse_temperature
        visible = is_token[None, :]
        if IS_OWN:
            visible = visible & (token[None, :] <= last_visible[:, None])
        if HAS_WINDOW:
            visible = visible & (distance[:, None] + token[None, :] > -window)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum; any number serves.
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(maximum - safe)
        if not IS_LATENT:
            values = _load_values(values_at + of_block, is_token, value_dims, VALUE_SIZE)
            values = _decode(values, FORMAT, queries.dtype)
        accumulator = accumulator * shrink[:, None]
        accumulator += _dot(weights.to(values.dtype), values, PRECISION, WIDEN)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_tiles(
    query_ptr, query_token, query_head,
    key_ptr, key_head, value_ptr, value_head,
    output_ptr, output_token, output_head, partial_output_ptr, partial_lse_ptr,
    table_ptr, table_row, cos_sin_ptr, slopes_ptr, sinks_ptr,
    tile_query_ptr, tile_request_ptr, tile_column_ptr, items_ptr,
    segments_ptr, read_span_ptr, read_position_ptr,
    own_first_slot_ptr, own_tokens_ptr, own_position_ptr, query_end_ptr, temperature_ptr,
    scale, softcap, window, value_scale,
    BLOCK_STRIDE: tl.constexpr, KEY_SLOT: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_SLOT: tl.constexpr, VALUE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, PADDED_HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr, IS_LATENT: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr, RUN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One item of one KV head. Names without a suffix are strides, in elements.

    Programs side by side take the same tokens in all KV heads, which lie side by side.
    """
    NUM_SLOTS: tl.constexpr = NUM_ROWS // GROUP_HEADS
    item_ptr = items_ptr + (tl.program_id(0) // NUM_KV_HEADS) * 8
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.load(item_ptr)
    first_segment, end_segment = tl.load(item_ptr + 1), tl.load(item_ptr + 2)

    rows = tl.arange(0, NUM_ROWS)
    slot = rows // GROUP_HEADS
    head = kv_head * GROUP_HEADS + rows % GROUP_HEADS
    is_row = slot < NUM_SLOTS
    entry = tile * NUM_SLOTS + slot
    dims, value_dims = tl.arange(0, PADDED_HEAD_SIZE), tl.arange(0, PADDED_VALUE_SIZE)
    if IS_LATENT:  # those behind the value
        dims += VALUE_SIZE
    query, has_query, rows_ptr = _find_rows(
        tile_query_ptr, query_ptr, query_token, query_head, entry, is_row, head
    )
    if ROTARY_DIM == 0:
        turned = _load_queries(rows_ptr, has_query, dims, HEAD_SIZE)

    # Only here where spans need it: it is made again for the own one.
    index = tl.zeros([NUM_ROWS], tl.int32)
    position = index
    slopes = tl.zeros([NUM_ROWS], tl.float32)
    if HAS_ALIBI or HAS_WINDOW:
        request = tl.load(tile_request_ptr + entry, mask=has_query, other=0)
        index = _own_index(own_tokens_ptr, query_end_ptr, query, request, has_query)
        position = index + tl.load(own_position_ptr + request, mask=has_query, other=0)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=has_query, other=0.0) * LOG2_E
    maximum = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    accumulator = tl.zeros([NUM_ROWS, PADDED_VALUE_SIZE], tl.float32)
    key_ptr += kv_head.to(tl.int64) * key_head
    value_ptr += kv_head.to(tl.int64) * value_head

    if HAS_SOFTCAP:
        scale = 2.0 * scale / softcap
        softcap = softcap * LOG2_E
    else:
        scale = scale * LOG2_E

    inverse_temperature = 1.0
    if HAS_TEMPERATURE:  # an item of chosen spans is of one request
        of_tile = tl.load(tile_request_ptr + tile * NUM_SLOTS)
        if tl.load(item_ptr + 7) != 0:
            inverse_temperature = 1.0 / tl.load(temperature_ptr + of_tile)

    for segment in range(first_segment, end_segment):
        segment_ptr = segments_ptr + segment * 5
        blocks_ptr = table_ptr + tl.load(segment_ptr + 1).to(tl.int64) * table_row
        # Zero is added, which no compiler knows: it would load what follows before the loop, and
        # keep it in registers that the loop over tokens needs.
        entry_now = entry + tl.minimum(segment, 0)
        _, is_here, here_ptr = _find_rows(
            tile_query_ptr, query_ptr, query_token, query_head, entry_now, is_row, head
        )
        read = tl.load(segment_ptr) + tl.load(tile_column_ptr + entry_now, mask=is_here, other=0)
        if ROTARY_DIM > 0:
            span = tl.load(read_span_ptr + read, mask=is_here, other=0)
            turned = _load_turned(here_ptr, is_here, cos_sin_ptr, span, dims, HEAD_SIZE,
                                  ROTARY_OFFSET, ROTARY_DIM, IS_NEOX, RUN)  # fmt: skip
        if IS_LATENT:
            latents = _load_queries(here_ptr, is_here, value_dims, VALUE_SIZE)
        else:
            latents = turned
        distance = position
        if HAS_ALIBI or HAS_WINDOW:
            seen = tl.load(read_position_ptr + read, mask=is_here, other=0)
            distance = seen + tl.load(segment_ptr + 4) - position
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, turned, latents, index, distance, slopes, key_ptr,
            value_ptr, blocks_ptr, tl.load(segment_ptr + 2), 0, tl.load(segment_ptr + 3), dims,
            value_dims, scale, softcap, window, inverse_temperature, False, BLOCK_STRIDE, KEY_SLOT,
            KEY_DIM, VALUE_SLOT, VALUE_DIM, HEAD_SIZE, VALUE_SIZE, IS_LATENT, HAS_SOFTCAP,
            HAS_ALIBI, HAS_WINDOW, HAS_TEMPERATURE, BLOCK_SIZE, CHUNK, PRECISION, WIDEN, FORMAT,
        )  # fmt: skip

    # Loaded only now, or again, likewise.
    own_request, share = tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    num_shares, first_partial = tl.load(item_ptr + 5), tl.load(item_ptr + 6)
    entry += tl.minimum(tile, 0)
    query, has_query, rows_ptr = _find_rows(
        tile_query_ptr, query_ptr, query_token, query_head, entry, is_row, head
    )
    if own_request >= 0:
        request = tl.load(tile_request_ptr + entry, mask=has_query, other=0)
        queries = _load_queries(rows_ptr, has_query, dims, HEAD_SIZE)
        if IS_LATENT:
            latents = _load_queries(rows_ptr, has_query, value_dims, VALUE_SIZE)
        else:
            latents = queries
        index = _own_index(own_tokens_ptr, query_end_ptr, query, request, has_query)
        # What the tile's queries see, in equal shares of whole chunks.
        num_visible = tl.max(tl.where(has_query, index, -1), 0) + 1
        first_visible = 0
        if HAS_WINDOW:
            first = tl.min(tl.where(has_query, index, num_visible), 0)
            first_visible = tl.maximum(first + 1 - window, 0)
        per_share = tl.cdiv(tl.cdiv(num_visible - first_visible, num_shares), CHUNK) * CHUNK
        begin = first_visible + share * per_share
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, queries, latents, index, -index, slopes, key_ptr,
            value_ptr, table_ptr + own_request.to(tl.int64) * table_row,
            tl.load(own_first_slot_ptr + own_request), begin,
            tl.minimum(begin + per_share, num_visible), dims, value_dims,
            scale, softcap, window, 1.0, True, BLOCK_STRIDE, KEY_SLOT, KEY_DIM,
            VALUE_SLOT, VALUE_DIM, HEAD_SIZE, VALUE_SIZE, IS_LATENT, HAS_SOFTCAP, HAS_ALIBI,
            HAS_WINDOW, False, BLOCK_SIZE, CHUNK, PRECISION, WIDEN, FORMAT,
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
        partial = (first_partial + slot).to(tl.int64) * (NUM_KV_HEADS * GROUP_HEADS) + head
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
    """The output of one head of one query from its partial results; of query -1 none.

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
        partial = tl.load(partial_output_ptr + at * VALUE_SIZE + dims, mask=is_dim, other=0.0)
        result += weight * partial.to(tl.float32)
    at = output_ptr + query * output_token + head * output_head
    is_stored = is_dim & (query >= 0)
    tl.store(at + dims, (result / total).to(output_ptr.dtype.element_ty), mask=is_stored)
