"""FlashAttention's online softmax (Dao et al. 2022) over the blocks in place, a tile of rows to a program.

Row r is query r // GROUP of the tile and head r % GROUP of the KV head's group, so heads that share keys load
them once. Scores are scaled by log2(e), so the softmax uses 2^x. Strides count elements. Arguments that
change from step to step are not specialised: if one became 1 or a multiple of 16, Triton would compile again
while serving. Nor is the alignment of a plan's tensors, which may be parts of one buffer.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scaled_queries(source, columns, inside, scale, OPERAND: tl.constexpr):
    """Load OPERAND [rows, columns] from the rows at `source`, zero outside, times `scale`."""
    q = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0)
    return (q.to(tl.float32) * scale).to(OPERAND)


@triton.jit
def _soften(scores, value, total, divisor, peak):
    """Add keys to the online softmax: `scores` [rows, keys] and their `value` [keys, columns].

    Returns the new `total`, `divisor` and `peak`, the running maximum.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    correction = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    divisor = divisor * correction + tl.sum(weights, 1)
    total = total * correction[:, None]
    total += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return total, divisor, new_peak


@triton.jit
def _scales(place, is_key):
    """Load float32 [keys] from bfloat16 at `place`, a pointer to bytes; 0 outside."""
    bits = tl.load(place.to(tl.pointer_type(tl.uint16)), mask=is_key, other=0).to(tl.uint32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _first_state(sinks_ptr, heads, is_row, HAS_SINKS: tl.constexpr):
    """Return the running maximum and sum of each row before the first key."""
    peak = tl.full([heads.shape[0]], -1.0e30, tl.float32)  # finite: a hidden key then gives 0 and no NaN
    divisor = tl.zeros([heads.shape[0]], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        divisor += 1.0
    return peak, divisor


@triton.jit
def _attend_tile(
    q,
    positions,
    kv_ptr,
    block,
    start,
    last_key,
    total,
    divisor,
    peak,
    softcap,
    window,
    block_stride,
    value_stride,
    token_stride,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Attend from q to keys start <= j < start + BLOCK_N in `block`; not masked: all rows see all of them."""
    columns = tl.arange(0, q.shape[1])
    keys = start + tl.arange(0, BLOCK_N)
    is_key = keys < last_key
    block = block.to(tl.int64)
    place = kv_ptr + block * block_stride + keys % BLOCK_TOKENS * token_stride
    key_at = place[:, None] + columns[None, :]
    if IS_MASKED or q.shape[1] > HEAD_DIM:
        inside = is_key[:, None] & (columns < HEAD_DIM)[None, :]
        key = tl.load(key_at, mask=inside, other=0.0)
        value = tl.load(key_at + value_stride, mask=inside, other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(key_at + value_stride)
    scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")
    if SCALE_BYTES > 0:
        scales = kv_ptr + block * block_stride + BLOCK_TOKENS * HEAD_DIM
        scales += keys % BLOCK_TOKENS * SCALE_BYTES
        scores = scores * _scales(scales, is_key)[None, :]
        value = value.to(tl.float32) * _scales(scales + value_stride, is_key)[:, None]
    if HAS_CAP:  # tanh(y) = 1 - 2 / (1 + e^2y)
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / softcap))))
    if IS_MASKED:
        age = positions[:, None] - keys[None, :]
        seen = (age >= 0) & (age < window) & is_key[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    return _soften(scores, value.to(q.dtype), total, divisor, peak)


@triton.jit
def _blocks(table_ptr, keys, last_key, BLOCK_TOKENS: tl.constexpr):
    """Load the blocks of keys; a loop loads the next tile's, so that loads of keys do not wait for them."""
    return tl.load(table_ptr + keys // BLOCK_TOKENS, mask=keys < last_key, other=0)


@triton.jit
def _attend_rows(
    q,
    positions,
    first_position,
    last_position,
    kv_ptr,
    table_ptr,
    first_key,
    last_key,
    peak,
    divisor,
    softcap,
    window,
    block_stride,
    value_stride,
    token_stride,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_ONE_LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from q to keys first_key <= j < last_key, first_key a multiple of BLOCK_N.

    q [rows, columns] is scaled, and so is softcap; positions int32 [rows] are the queries', from
    first_position to last_position; kv_ptr is at the KV head; peak and divisor are those of `_first_state`.
    Products are in q's dtype. SCALE_BYTES > 0: the cache holds codes (`kernels.kv_codes`). Tiles that all
    rows see whole come first and need no masks, then those before them, which a window cuts, and those at the
    end. IS_ONE_LOOP: all in order, with masks, so that the loads of the last tile do not wait for the others.
    Returns the weighted sum of the values [rows, columns], its divisor and the running maximum.
    """
    total = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    keys = tl.arange(0, BLOCK_N)
    first_seen = first_key
    behind_seen = first_key
    if not IS_ONE_LOOP:
        first_seen = tl.maximum(first_key, (last_position - window + BLOCK_N) // BLOCK_N * BLOCK_N)
        behind_seen = tl.minimum(first_position + 1, last_key) // BLOCK_N * BLOCK_N
        if behind_seen < first_seen:
            first_seen = first_key
            behind_seen = first_key
        block = _blocks(table_ptr, first_seen + keys, last_key, BLOCK_TOKENS)
        for start in tl.range(first_seen, behind_seen, BLOCK_N, num_stages=STAGES):
            total, divisor, peak = _attend_tile(
                *(q, positions, kv_ptr, block, start, last_key, total, divisor, peak, softcap, window),
                *(block_stride, value_stride, token_stride),
                *(BLOCK_TOKENS, HEAD_DIM, BLOCK_N, SCALE_BYTES, HAS_CAP, False),
            )
            block = _blocks(table_ptr, start + BLOCK_N + keys, last_key, BLOCK_TOKENS)
    skipped = behind_seen - first_seen
    start = tl.where(first_key < first_seen, first_key, first_key + skipped)
    block = _blocks(table_ptr, start + keys, last_key, BLOCK_TOKENS)
    for place in tl.range(first_key, last_key - skipped, BLOCK_N, num_stages=STAGES):
        start = tl.where(place < first_seen, place, place + skipped)
        total, divisor, peak = _attend_tile(
            *(q, positions, kv_ptr, block, start, last_key, total, divisor, peak, softcap, window),
            *(block_stride, value_stride, token_stride),
            *(BLOCK_TOKENS, HEAD_DIM, BLOCK_N, SCALE_BYTES, HAS_CAP, True),
        )
        place += BLOCK_N
        start = tl.where(place < first_seen, place, place + skipped)
        block = _blocks(table_ptr, start + keys, last_key, BLOCK_TOKENS)
    return total, divisor, peak


@triton.jit
def _sequence_of(tile, bounds_ptr, num_seqs, BLOCK_Q: tl.constexpr):
    """Find the last sequence whose first tile is not past this one."""
    low = tl.full([], 0, tl.int32)
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_past = tl.load(bounds_ptr + middle) // BLOCK_Q + middle > tile
        low, high = tl.where(is_past, low, middle), tl.where(is_past, middle, high)
    return low


@triton.jit(
    do_not_specialize=("window", "num_seqs", "table_stride"),
    do_not_specialize_on_alignment=("bounds_ptr", "contexts_ptr", "table_ptr"),
)
def chunk_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    bounds_ptr,
    contexts_ptr,
    table_ptr,
    table_stride,
    scale,
    window,
    softcap,
    sinks_ptr,
    num_seqs,
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from the sequences with more than one new token; grid (T // BLOCK_Q + S, Hkv).

    q, out [T, Hq, D]; kv [B, Hkv, 2, bt, D]; table int32 [S, max_blocks]. Sequence s starts at tile
    cu[s] // BLOCK_Q + s, which leaves every sequence the tiles it needs, without asking the device.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    seq = _sequence_of(tile, bounds_ptr, num_seqs, BLOCK_Q)
    begin = tl.load(bounds_ptr + seq)
    length = tl.load(bounds_ptr + seq + 1) - begin
    first_query = (tile - (begin // BLOCK_Q + seq)) * BLOCK_Q
    if (first_query < length) & (length > 1):
        rows = tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_DIM)
        queries = first_query + rows // GROUP
        is_row = (rows < BLOCK_Q * GROUP) & (queries < length)
        inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tokens, heads = (begin + queries).to(tl.int64), head * GROUP + rows % GROUP
        source = q_ptr + tokens * q_token_stride + heads * q_head_stride
        context = tl.load(contexts_ptr + seq)
        before = context - length
        peak, divisor = _first_state(sinks_ptr, heads, is_row, HAS_SINKS)
        total, divisor, _ = _attend_rows(
            _scaled_queries(source, columns, inside, scale, OPERAND),
            before + queries,
            before + first_query,
            before + tl.minimum(first_query + BLOCK_Q, length) - 1,
            kv_ptr + head * head_stride,
            table_ptr + seq.to(tl.int64) * table_stride,
            tl.maximum(0, before + first_query - window + 1) // BLOCK_N * BLOCK_N,
            tl.minimum(context, before + first_query + BLOCK_Q),
            *(peak, divisor, softcap, window, block_stride, value_stride, token_stride),
            *(BLOCK_TOKENS, HEAD_DIM, BLOCK_N, SCALE_BYTES, HAS_CAP, False, STAGES),
        )
        target = out_ptr + tokens * out_token_stride + heads * out_head_stride
        result = (total / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target[:, None] + columns[None, :], result, mask=inside)


@triton.jit(
    do_not_specialize=("window", "num_splits", "table_stride"),
    do_not_specialize_on_alignment=("bounds_ptr", "contexts_ptr", "table_ptr"),
)
def decode_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    bounds_ptr,
    contexts_ptr,
    table_ptr,
    table_stride,
    scale,
    window,
    softcap,
    sinks_ptr,
    num_splits,
    num_heads,
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_ONE_LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from the sequences with one new token; grid (S, Hkv, splits of a long context).

    Writes partial float32 [S, Hq, splits, HEAD_DIM] and state float32 [S, Hq, splits, 2] (divisor and
    maximum). A split without keys writes divisor 0. IS_WHOLE: there is one split, and the result goes to
    out [T, Hq, D].
    """
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(bounds_ptr + seq)
    context = tl.load(contexts_ptr + seq)  # while the bounds are on their way
    if tl.load(bounds_ptr + seq + 1) - begin == 1:
        rows = tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_DIM)
        inside = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        heads = head * GROUP + rows
        source = q_ptr + begin.to(tl.int64) * q_token_stride + heads * q_head_stride
        first_tile = tl.maximum(0, context - window) // BLOCK_N
        share = tl.cdiv(tl.cdiv(context, BLOCK_N) - first_tile, num_splits)
        first_key = (first_tile + split * share) * BLOCK_N
        peak, divisor = _first_state(sinks_ptr, heads, (rows < GROUP) & (split == 0), HAS_SINKS)
        if HAS_SINKS:  # the first split alone has the sink
            peak = tl.where(split == 0, peak, -1.0e30)
            divisor = tl.where(split == 0, divisor, 0.0)
        total, divisor, peak = _attend_rows(
            _scaled_queries(source, columns, inside, scale, OPERAND),
            tl.full([BLOCK_ROWS], 0, tl.int32) + context - 1,
            context - 1,
            context - 1,
            kv_ptr + head * head_stride,
            table_ptr + seq * table_stride,
            first_key,
            tl.minimum(context, first_key + share * BLOCK_N),
            *(peak, divisor, softcap, window, block_stride, value_stride, token_stride),
            *(BLOCK_TOKENS, HEAD_DIM, BLOCK_N, SCALE_BYTES, HAS_CAP, IS_ONE_LOOP, STAGES),
        )
        if IS_WHOLE:
            target = out_ptr + begin.to(tl.int64) * out_token_stride + heads * out_head_stride
            # Without a key, as in a row that fills a recorded step, the result is 0, not NaN.
            result = total / tl.where(divisor > 0, divisor, 1.0)[:, None]
            result = result.to(out_ptr.dtype.element_ty)
            tl.store(target[:, None] + columns[None, :], result, mask=inside)
        else:
            place = (seq * num_heads + heads) * num_splits + split
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], total, mask=inside)
            tl.store(state_ptr + place * 2, divisor, mask=rows < GROUP)
            tl.store(state_ptr + place * 2 + 1, peak, mask=rows < GROUP)


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=("bounds_ptr",))
def join_kernel(
    partial_ptr,
    state_ptr,
    out_ptr,
    bounds_ptr,
    num_splits,
    num_heads,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Join the splits of one decode's head (Flash-Decoding, Dao et al. 2023); grid (S, Hq)."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(bounds_ptr + seq)
    if tl.load(bounds_ptr + seq + 1) - begin == 1:
        splits = tl.arange(0, BLOCK_SPLITS)
        columns = tl.arange(0, BLOCK_DIM)
        place = (seq * num_heads + head) * num_splits + splits
        divisor = tl.load(state_ptr + place * 2, mask=splits < num_splits, other=0.0)
        peak = tl.load(state_ptr + place * 2 + 1, mask=splits < num_splits, other=-1.0e30)
        share = tl.exp2(peak - tl.max(peak, 0))
        inside = (splits < num_splits)[:, None] & (columns < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        total = tl.sum(divisor * share, 0)
        # Without a key, as in a row that fills a step recorded for more sequences, the result is 0, not NaN.
        result = tl.sum(partial * share[:, None], 0) / tl.where(total > 0, total, 1.0)
        target = out_ptr + begin.to(tl.int64) * out_token_stride + head * out_head_stride + columns
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)
