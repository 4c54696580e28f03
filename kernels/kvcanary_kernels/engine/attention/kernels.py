"""The kernels of paged attention: a program folds one tile of queries with one split of a row's keys.

The queries of all heads that share a KV head make one tile, token by token, so that K and V are read once for them.
Exponents are of two; a running maximum begins at a finite LEAST, so that what sees nothing needs no case of its own.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary_kernels.content.reads import add_fingerprints, byte_factors
from kvcanary_kernels.record.device import follow, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["n", "num_slots", "num_indices", "num_splits", "scale", "v_factor"])
def _attend_kernel(
    q,
    k,
    v,
    kv_indptr,
    kv_indices,
    kv_lens,
    q_indptr,
    tree_mask,
    k_scale,
    v_scale,
    out,
    lse,
    partial,
    factors,
    missing,
    scale_keys,
    sums,
    scale,
    v_factor,
    n,
    num_slots,
    num_indices,
    num_splits,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_scale_stride,
    v_scale_stride,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    K_PER_SLOT: tl.constexpr,
    V_PER_SLOT: tl.constexpr,
    ITEM: tl.constexpr,
    HASHES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SCALE_KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_head = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1) % num_splits
    i_tile = tl.num_programs(1) // num_splits - 1 - tl.program_id(1) // num_splits  # those with most keys first
    i_row = tl.program_id(2).to(tl.int64)
    q_first = tl.maximum(tl.load(q_indptr + i_row), 0)
    q_len = tl.minimum(tl.load(q_indptr + i_row + 1), n) - q_first
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_token = o_m // FOLD
    first_token = (i_tile * BLOCK_M) // FOLD
    end_token = tl.minimum((i_tile * BLOCK_M + BLOCK_M - 1) // FOLD + 1, q_len)
    if first_token >= q_len:
        return
    kv_first, kv_len = _keys(kv_indptr, kv_indices, kv_lens, i_row, num_indices, PAGE, HAS_LENS)
    own = kv_len - q_len  # place of the queries' first own key
    first, last, clear_end = _range(own, kv_len, first_token, end_token, NODES, WINDOW, CAUSAL)
    share = tl.cdiv(tl.cdiv(last - first, num_splits), BLOCK_N) * BLOCK_N
    first += i_split * share
    last = tl.minimum(first + share, last)
    clear_end = first + tl.maximum(tl.minimum(clear_end, last) - first, 0) // BLOCK_N * BLOCK_N

    o_d = tl.arange(0, BLOCK_D)
    m_m = o_token < q_len
    m_d = o_d < DIM
    o_head = i_head * FOLD + o_m % FOLD
    o_q = (q_first + o_token) * q_stride + o_head * q_head_stride
    b_q = tl.load(q + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)  # [M, D]
    if HAS_K_SCALE:
        scale *= tl.load(k_scale)
    scale *= LOG2_E
    mask_row = tree_mask + i_row * NODES * NODES
    m_key = tl.arange(0, BLOCK_N) < BLOCK_N
    if HASHES:  # the tile of a row's last query reads all of its keys
        sums += kv_first * PAGE
        is_whole = end_token == q_len
        b_missing = tl.load(missing + i_head)
        k_factors = factors + i_head * (ITEM * DIM * 16)
        v_factors = k_factors + HEADS * (ITEM * DIM * 16)
        f_k0, f_k1, f_k2, f_k3 = byte_factors(k_factors, o_d, DIM, ITEM)
        f_v0, f_v1, f_v2, f_v3 = byte_factors(v_factors, o_d, DIM, ITEM)

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], LEAST, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    for i_n in range(first, clear_end, BLOCK_N):  # what every query of the tile sees
        o_n = i_n + tl.arange(0, BLOCK_N)
        slots = _slots(kv_indices + kv_first, o_n, m_key, num_slots, PAGE)
        b_k_row = _rows(k + i_head * k_head_stride, slots, k_stride, o_d, m_key, DIM, BLOCK_D)
        b_k = _scaled(b_k_row, k_scale, slots, k_scale_stride, m_key, K_PER_SLOT).to(b_q.dtype)
        b_v_row = _rows(v + i_head * v_head_stride, slots, v_stride, o_d, m_key, DIM, BLOCK_D)
        b_v = _scaled(b_v_row, v_scale, slots, v_scale_stride, m_key, V_PER_SLOT).to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if HASHES:
            add_fingerprints(
                sums + o_n, b_k_row, b_v_row, f_k0, f_k1, f_k2, f_k3, f_v0, f_v1, f_v2, f_v3, b_missing,
                slots, k_scale, k_scale_stride, v_scale, v_scale_stride, scale_keys, i_head, m_key, is_whole,
                BLOCK_N, ITEM, PACKED, HAS_SCALE_KEYS,
            )  # fmt: skip
        b_acc, b_max, b_sum = _fold(b_s, b_v, b_acc, b_max, b_sum)
    for i_n in range(clear_end, last, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        slots = _slots(kv_indices + kv_first, o_n, m_n, num_slots, PAGE)
        b_k_row = _rows(k + i_head * k_head_stride, slots, k_stride, o_d, m_n, DIM, BLOCK_D)
        b_k = _scaled(b_k_row, k_scale, slots, k_scale_stride, m_n, K_PER_SLOT).to(b_q.dtype)
        b_v_row = _rows(v + i_head * v_head_stride, slots, v_stride, o_d, m_n, DIM, BLOCK_D)
        b_v = _scaled(b_v_row, v_scale, slots, v_scale_stride, m_n, V_PER_SLOT).to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if HASHES:
            add_fingerprints(
                sums + o_n, b_k_row, b_v_row, f_k0, f_k1, f_k2, f_k3, f_v0, f_v1, f_v2, f_v3, b_missing,
                slots, k_scale, k_scale_stride, v_scale, v_scale_stride, scale_keys, i_head, m_n, is_whole,
                BLOCK_N, ITEM, PACKED, HAS_SCALE_KEYS,
            )  # fmt: skip
        seen = m_n[None, :]
        if CAUSAL:
            seen &= _seen(o_n - own, o_token, m_m, mask_row, NODES, BLOCK_NODES, WINDOW)
        b_acc, b_max, b_sum = _fold(tl.where(seen, b_s, float("-inf")), b_v, b_acc, b_max, b_sum)

    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    b_lse = _log_sum(b_max, b_sum)
    if HAS_V_SCALE:
        v_factor *= tl.load(v_scale)
    o_lse = (q_first + o_token) * (HEADS * FOLD) + o_head
    m_out = m_m[:, None] & m_d[None, :]
    if HAS_SPLITS:
        size = n.to(tl.int64) * (HEADS * FOLD)
        o_part = i_split * size + o_lse
        tl.store(partial + o_part[:, None] * DIM + o_d[None, :], b_out * v_factor, mask=m_out)
        lses = partial + size * DIM * num_splits
        tl.store(lses + o_part, b_lse, mask=m_m)
    else:
        o_out = (q_first + o_token) * out_stride + o_head * out_head_stride
        tl.store(out + o_out[:, None] + o_d[None, :], (b_out * v_factor).to(out.dtype.element_ty), mask=m_out)
        if HAS_LSE:
            tl.store(lse + o_lse, b_lse, mask=m_m)


@triton.jit(do_not_specialize=["n", "num_rows", "num_splits"])
def _merge_kernel(
    partial,
    q_indptr,
    out,
    lse,
    n,
    num_rows,
    num_splits,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The mean of the splits of one query and head, weighted by their sums of exponents."""
    follow(OVERLAPS)
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    if (i_token < tl.load(q_indptr)) | (i_token >= tl.load(q_indptr + num_rows)):
        return
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < num_splits
    m_d = o_d < DIM
    size = n.to(tl.int64) * HEADS
    o_part = o_s * size + i_token * HEADS + i_head
    b_lse = tl.load(partial + size * DIM * num_splits + o_part, mask=m_s, other=float("-inf"))
    b_max = tl.maximum(tl.max(b_lse) * LOG2_E, LEAST)
    b_weight = tl.exp2(b_lse * LOG2_E - b_max)
    b_sum = tl.sum(b_weight)
    b_part = tl.load(partial + o_part[:, None] * DIM + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
    b_out = tl.sum(b_part * b_weight[:, None], 0) / tl.where(b_sum > 0, b_sum, 1.0)
    o_out = i_token * out_stride + i_head * out_head_stride
    tl.store(out + o_out + o_d, b_out.to(out.dtype.element_ty), mask=m_d)
    if HAS_LSE:
        tl.store(lse + i_token * HEADS + i_head, _log_sum(b_max, b_sum))


@triton.jit
def _keys(kv_indptr, kv_indices, kv_lens, i_row, num_indices, PAGE: tl.constexpr, HAS_LENS: tl.constexpr):
    """Where a row's pages begin, and how many keys they hold."""
    first = tl.minimum(tl.maximum(tl.load(kv_indptr + i_row), 0), num_indices)
    end = tl.minimum(tl.maximum(tl.load(kv_indptr + i_row + 1), first), num_indices)
    length = (end - first) * PAGE
    if HAS_LENS:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + i_row), 0), length)
    return first, length


@triton.jit
def _range(
    own,
    kv_len,
    first_token,
    end_token,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Keys [first, last) are seen by any query of the tile, [first, clear_end) by all of them."""
    first = 0
    last = kv_len
    clear_end = kv_len
    if CAUSAL:
        clear_end = own
        if NODES == 0:
            last = tl.minimum(last, own + end_token)
            clear_end = own + first_token + 1
    if WINDOW > 0:
        first = own - WINDOW + 1
        if NODES == 0:
            first += first_token
        first = tl.minimum(tl.maximum(first, 0), last)
        clear_end = first
    return first, last, clear_end


@triton.jit
def _slots(indices, o_n, m_n, num_slots, PAGE: tl.constexpr):
    """The slots of the keys o_n; what is no page of the pool becomes the null page."""
    pages = tl.load(indices + o_n // PAGE, mask=m_n, other=0)
    pages = tl.where((pages >= 0) & (pages < num_slots // PAGE), pages, 0)
    return pages * PAGE + o_n % PAGE


@triton.jit
def _rows(base, slots, stride, o_d, m_n, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, D]: one head's row of each slot; zeros past a row's end, whatever lies there."""
    rows = base + slots[:, None] * stride + o_d[None, :]
    if DIM == BLOCK_D:
        return tl.load(rows, mask=m_n[:, None], other=0.0)
    return tl.load(rows, mask=m_n[:, None] & (o_d < DIM)[None, :], other=0.0)


@triton.jit
def _scaled(b_rows, scales, slots, stride, m_n, PER_SLOT: tl.constexpr):
    """Rows of these slots [N, D], each times the scale of its slot, if slots have one."""
    if PER_SLOT:
        b_rows = b_rows.to(tl.float32) * tl.load(scales + slots * stride, mask=m_n, other=0.0)[:, None]
    return b_rows


@triton.jit
def _seen(
    column,
    o_token,
    m_m,
    mask_row,
    NODES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """[M, N]: which keys each query sees, by their place among the queries' own keys (negative: before them)."""
    if NODES == 0:
        seen = column[None, :] <= o_token[:, None]
        if WINDOW > 0:
            seen &= column[None, :] > o_token[:, None] - WINDOW
        return seen
    is_own = (column >= 0) & (column < NODES)
    is_node = m_m & (o_token < NODES)
    nodes = mask_row + o_token[:, None] * NODES + column[None, :]
    seen = tl.load(nodes, mask=is_node[:, None] & is_own[None, :], other=0) != 0
    seen |= (column < 0)[None, :]
    if WINDOW > 0:
        place = tl.where(column < 0, column, _depths(mask_row, column, is_own, NODES, BLOCK_NODES))
        depth = _depths(mask_row, o_token, is_node, NODES, BLOCK_NODES)
        seen &= place[None, :] > depth[:, None] - WINDOW
    return seen


@triton.jit
def _depths(mask_row, nodes, m_node, NODES: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """How far below the root nodes lie: those that each sees, less itself."""
    o_o = tl.arange(0, BLOCK_NODES)
    m_o = m_node[:, None] & (o_o < NODES)[None, :]
    row = tl.load(mask_row + nodes[:, None] * NODES + o_o[None, :], mask=m_o, other=0)
    return tl.sum((row != 0).to(tl.int32), 1) - 1


@triton.jit
def _fold(b_s, b_v, b_acc, b_max, b_sum):
    """One block of scores [M, N] and values [N, D] into the running sums."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new[:, None])
    b_old = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_old + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def _log_sum(b_max, b_sum):
    """Natural logarithm of b_sum * 2^b_max; -inf of nothing."""
    return tl.where(b_sum > 0, b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), float("-inf")) / LOG2_E
