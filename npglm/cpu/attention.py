"""Absorbed MLA over the cached latent rows that top_k names, and the parts it shares with the indexer.

Keys are taken KEYS at a time: converted to f32 once, as rows in blocks of 16 columns and transposed, then used for all heads.
Both products are tiles.multiply_f32: scores are [16 keys] x [TOKENS heads] over R+P, values [16 of R] x [TOKENS heads] over keys.
One token: a chunk of keys is an item, and the chunks' parts are joined in order. More: a block of tokens is an item.
"""

import numpy as np

from npglm.cpu.jit import entry, inner, kernel
from npglm.cpu.job import get, put
from npglm.cpu.products import function
from npglm.cpu.simd import TOKENS as WIDTH
from npglm.cpu.simd import (
    as_f32,
    call_2,
    exp_f32x16,
    fetch_add_one,
    first_lane,
    lane_max,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    maximum,
    prefetch,
    splat_f32x16,
    store_f32,
    store_f32x16,
    store_i64,
    sum_f32x16,
    tile_store,
    transpose_16x16,
)
from npglm.cpu.threads import on_all_threads
from npglm.cpu.tiles import multiply_f32
from npglm.cpu.workspace import mark, n_threads, release, take

KEYS = 256  # of a chunk
TOKEN_BLOCK = 4  # neighbours often attend to the same keys
LOWEST = np.float32(-3.0e38)

# What the kernels get: addresses, sizes in elements; CACHE_BYTES: of one number; SCALE: bits of the f32. COUNTER begins a cache line.
(
    WS, Q, CACHE, TOP_K, POS, OUT, T, H, R, RP, N_KEYS, CACHE_BYTES, SCALE, PARTS, SCRATCHES, SCRATCH_BYTES, N_ITEMS,
) = range(17)  # fmt: skip
COUNTER_AT, SHARED_BYTES = 192, 256


@inner
def run_items(ws, index, shared, n_items, threads):
    """Let threads call the kernel, which takes items by next_item() until it gets n_items or more."""
    put(shared, N_ITEMS, n_items)
    store_i64(shared + COUNTER_AT, 0)
    if threads == 1 or n_items == 1:
        call_2(function(ws, index), shared, 0)
    else:
        on_all_threads(function(ws, index), shared, threads)


@inner
def next_item(shared):
    return fetch_add_one(shared + COUNTER_AT)


# --- keys -------------------------------------------------------------------------------------------------------------------


@inner
def blocks(n):
    return (n + 15) // 16


@inner
def load_keys(cache, number_bytes, n_columns, indices, n_keys, rows, columns):
    """Cache rows indices[0..n_keys) (int64 at an address) -> rows f32 [columns/16][KEYS][16], columns f32 [keys/16][columns][16]."""
    whole, n_blocks = n_columns // 16, blocks(n_columns)
    row_bytes = number_bytes * n_columns
    for i in range(blocks(n_keys) * 16):
        if i >= n_keys:
            for b in range(n_blocks):
                store_f32x16(rows + 64 * (KEYS * b + i), splat_f32x16(np.float32(0)))
            continue
        at = cache + row_bytes * load_i64(indices + 8 * i)
        if i + 4 < n_keys:
            ahead = cache + row_bytes * load_i64(indices + 8 * (i + 4))
            for line in range(0, row_bytes, 64):
                prefetch(ahead + line)
        for b in range(whole):
            v = load_f16x16(at + 32 * b) if number_bytes == 2 else load_f32x16(at + 64 * b)
            store_f32x16(rows + 64 * (KEYS * b + i), v)
        if whole < n_blocks:
            to = rows + 64 * (KEYS * whole + i)
            store_f32x16(to, splat_f32x16(np.float32(0)))
            for c in range(16 * whole, n_columns):
                v = load_f16(at + 2 * c) if number_bytes == 2 else load_f32(at + 4 * c)
                store_f32(to + 4 * (c - 16 * whole), v)
    for i in range(blocks(n_keys)):
        for b in range(n_blocks):
            _columns(rows + 64 * (KEYS * b + 16 * i), columns + 1024 * (i * n_blocks + b))


@inner
def _columns(source, to):
    transpose_16x16(source, 64, to, to + 512, 64)


@inner
def pack_heads(q, n_heads, n, scale, panels):
    """q f32 [heads][n] -> panels [heads/WIDTH][n][WIDTH], times scale; heads after the last are zero."""
    for first in range(0, n_heads, WIDTH):
        for h in range(WIDTH):
            for i in range(n):
                v = load_f32(q + 4 * ((first + h) * n + i)) * scale if first + h < n_heads else np.float32(0)
                store_f32(panels + 4 * (WIDTH * i + h), v)
        panels += 4 * WIDTH * n


# --- one chunk --------------------------------------------------------------------------------------------------------------


@inner
def softmax(score, n, n_padded):
    """f32 [n] -> exp(score - max), zero after n. Returns the maximum and the sum."""
    most = splat_f32x16(LOWEST)
    for i in range(n, n_padded):
        store_f32(score + 4 * i, LOWEST)
    for i in range(0, n_padded, 16):
        most = maximum(load_f32x16(score + 4 * i), most)
    top = lane_max(most)
    total, top_16 = splat_f32x16(np.float32(0)), splat_f32x16(top)
    for i in range(0, n_padded, 16):
        p = exp_f32x16(load_f32x16(score + 4 * i) - top_16)
        total = total + p
        store_f32x16(score + 4 * i, p)
    return top, sum_f32x16(total)


@inner
def attend(rows, columns, n_keys, panels, n_heads, rank, n_columns, spare, most, total, out):
    """One token's heads over the loaded keys -> most, total f32 [H], out f32 [H][R], not yet divided by total."""
    n_padded = 16 * blocks(n_keys)
    score, p = spare, spare + 4 * KEYS * WIDTH
    padded_columns = 16 * blocks(n_columns)
    for first in range(0, n_heads, WIDTH):
        here = min(WIDTH, n_heads - first)
        for i in range(blocks(n_keys)):
            tile = multiply_f32(columns + 64 * padded_columns * i, panels, n_columns)
            tile_store(tile, score + 64 * i, 4 * KEYS, here)
        for h in range(WIDTH):
            if h < here:
                top, s = softmax(score + 4 * KEYS * h, n_keys, n_padded)
                store_f32(most + 4 * (first + h), top)
                store_f32(total + 4 * (first + h), s)
            for i in range(n_keys):
                store_f32(p + 4 * (WIDTH * i + h), load_f32(score + 4 * (KEYS * h + i)) if h < here else np.float32(0))
        to = out + 4 * rank * first
        for b in range(blocks(rank)):
            tile = multiply_f32(rows + 64 * KEYS * b, p, n_keys)
            if 16 * (b + 1) <= rank:
                tile_store(tile, to + 64 * b, 4 * rank, here)
            else:
                tile_store(tile, score, 64, here)
                for h in range(here):
                    for c in range(16 * b, rank):
                        store_f32(to + 4 * (rank * h + c), load_f32(score + 64 * h + 4 * (c - 16 * b)))
        panels += 4 * WIDTH * n_columns


@inner
def join(most, total, out, n_heads, rank, most_2, total_2, out_2):
    """Add the part `_2` to the first."""
    for h in range(n_heads):
        a, b = load_f32(most + 4 * h), load_f32(most_2 + 4 * h)
        top = max(a, b)
        scale_a, scale_b = exp_f32(a - top), exp_f32(b - top)
        store_f32(most + 4 * h, top)
        store_f32(total + 4 * h, load_f32(total + 4 * h) * scale_a + load_f32(total_2 + 4 * h) * scale_b)
        for i in range(rank * h, rank * h + rank):
            store_f32(out + 4 * i, load_f32(out + 4 * i) * scale_a + load_f32(out_2 + 4 * i) * scale_b)


@inner
def exp_f32(x):
    return first_lane(exp_f32x16(splat_f32x16(x)))


@inner
def divide(total, out, n_heads, rank, to):
    for h in range(n_heads):
        inverse = np.float32(1) / load_f32(total + 4 * h)
        for i in range(rank * h, rank * h + rank):
            store_f32(to + 4 * i, load_f32(out + 4 * i) * inverse)


@inner
def valid_keys(shared, t, indices):
    """The entries of top_k's row t that are no padding -> int64 at `indices`; returns how many."""
    row, last, n = get(shared, TOP_K) + 4 * t * get(shared, N_KEYS), load_i32(get(shared, POS) + 4 * t), 0
    for i in range(get(shared, N_KEYS)):
        s = load_i32(row + 4 * i)
        if 0 <= s <= last:
            store_i64(indices + 8 * n, s)
            n += 1
    return n


# --- kernels ----------------------------------------------------------------------------------------------------------------


@inner
def keys_bytes(n_columns):
    """Of `rows` and `columns` together."""
    return 2 * 64 * KEYS * blocks(n_columns)


@inner
def panels_bytes(n_heads, n):
    return (n_heads + WIDTH - 1) // WIDTH * WIDTH * 4 * n


SPARE_BYTES = 4 * 2 * KEYS * WIDTH


@inner
def part_bytes(n_heads, rank):
    """Of most, total and out."""
    return 4 * n_heads * (2 + rank)


@kernel
def attend_chunks(shared, thread):
    """One token: items are chunks of its keys, whose parts go to PARTS."""
    n_heads, rank, n_columns = get(shared, H), get(shared, R), get(shared, RP)
    rows = get(shared, SCRATCHES) + thread * get(shared, SCRATCH_BYTES)
    columns = rows + keys_bytes(n_columns) // 2
    panels = columns + keys_bytes(n_columns) // 2
    spare = panels + panels_bytes(n_heads, n_columns)
    indices = spare + SPARE_BYTES
    n, packed = valid_keys(shared, 0, indices), False
    while True:
        item = next_item(shared)
        if item >= get(shared, N_ITEMS):
            return
        if not packed:
            pack_heads(get(shared, Q), n_heads, n_columns, as_f32(get(shared, SCALE)), panels)
            packed = True
        part = get(shared, PARTS) + part_bytes(n_heads, rank) * item
        here = min(KEYS, n - KEYS * item)
        if here <= 0:  # padding only
            for h in range(n_heads):
                store_f32(part + 4 * h, LOWEST)
            for i in range(n_heads * (1 + rank)):
                store_f32(part + 4 * (n_heads + i), np.float32(0))
            continue
        load_keys(get(shared, CACHE), get(shared, CACHE_BYTES), n_columns, indices + 8 * KEYS * item, here, rows, columns)
        total = part + 4 * n_heads
        attend(rows, columns, here, panels, n_heads, rank, n_columns, spare, part, total, total + 4 * n_heads)


@kernel
def attend_tokens(shared, thread):
    """More tokens: items are blocks of TOKEN_BLOCK of them."""
    n_heads, rank, n_columns, n_all = get(shared, H), get(shared, R), get(shared, RP), get(shared, N_KEYS)
    rows = get(shared, SCRATCHES) + thread * get(shared, SCRATCH_BYTES)
    columns = rows + keys_bytes(n_columns) // 2
    panels = columns + keys_bytes(n_columns) // 2
    panels_step = panels_bytes(n_heads, n_columns)
    spare = panels + TOKEN_BLOCK * panels_step
    part = spare + SPARE_BYTES
    part_step = part_bytes(n_heads, rank)
    parts = part + part_step
    indices = parts + TOKEN_BLOCK * part_step
    counts = indices + 8 * n_all * TOKEN_BLOCK
    while True:
        first = next_item(shared) * TOKEN_BLOCK
        if first >= get(shared, T):
            return
        n_tokens, longest = min(TOKEN_BLOCK, get(shared, T) - first), 0
        for i in range(n_tokens):
            n = valid_keys(shared, first + i, indices + 8 * n_all * i)
            store_i64(counts + 8 * i, n)
            longest = max(longest, n)
            if n == 0:  # no chunk writes this part: 0 / 0
                for j in range(n_heads * (1 + rank)):
                    store_f32(parts + part_step * i + 4 * (n_heads + j), np.float32(0))
            q = get(shared, Q) + 4 * n_heads * n_columns * (first + i)
            pack_heads(q, n_heads, n_columns, as_f32(get(shared, SCALE)), panels + panels_step * i)
        for chunk in range(0, longest, KEYS):
            loaded = loaded_from = 0  # the keys in `rows` are the first `loaded` at address `loaded_from`
            for i in range(n_tokens - 1, -1, -1):
                mine, here = indices + 8 * (n_all * i + chunk), min(KEYS, load_i64(counts + 8 * i) - chunk)
                if here <= 0:
                    continue
                same = here <= loaded
                for k in range(here if same else 0):
                    same = same and load_i64(mine + 8 * k) == load_i64(loaded_from + 8 * k)
                if not same:
                    load_keys(get(shared, CACHE), get(shared, CACHE_BYTES), n_columns, mine, here, rows, columns)
                    loaded, loaded_from = here, mine
                to = parts + part_step * i if chunk == 0 else part
                total = to + 4 * n_heads
                out = total + 4 * n_heads
                attend(rows, columns, here, panels + panels_step * i, n_heads, rank, n_columns, spare, to, total, out)
                if chunk:
                    a = parts + part_step * i
                    join(a, a + 4 * n_heads, a + 8 * n_heads, n_heads, rank, to, total, out)
        for i in range(n_tokens):
            a = parts + part_step * i
            divide(a + 4 * n_heads, a + 8 * n_heads, n_heads, rank, get(shared, OUT) + 4 * n_heads * rank * (first + i))


KERNELS = (attend_chunks, attend_tokens)
ATTEND_CHUNKS, ATTEND_TOKENS = 6, 7  # where ops.py puts them, after products.KERNELS


@entry
def run_attention(ws, q, cache, cache_bytes, top_k, pos, out, n_tokens, n_heads, rank, n_columns, n_keys, scale_bits):
    """q f32 [T,H,R+P] and so on, by address; top_k int32 [T,n_keys] -> out f32 [T,H,R]."""
    at = mark(ws)
    shared, threads = take(ws, SHARED_BYTES), n_threads(ws)
    put(shared, WS, ws)
    put(shared, Q, q)
    put(shared, CACHE, cache)
    put(shared, CACHE_BYTES, cache_bytes)
    put(shared, TOP_K, top_k)
    put(shared, POS, pos)
    put(shared, OUT, out)
    put(shared, T, n_tokens)
    put(shared, H, n_heads)
    put(shared, R, rank)
    put(shared, RP, n_columns)
    put(shared, N_KEYS, n_keys)
    put(shared, SCALE, scale_bits)
    block = 1 if n_tokens == 1 else TOKEN_BLOCK
    parts = 0 if n_tokens == 1 else 1 + TOKEN_BLOCK
    scratch = keys_bytes(n_columns) + SPARE_BYTES + block * panels_bytes(n_heads, n_columns) + parts * part_bytes(n_heads, rank)
    scratch = (scratch + 8 * block * (n_keys + 1) + 127) // 64 * 64
    put(shared, SCRATCH_BYTES, scratch)
    put(shared, SCRATCHES, take(ws, scratch * threads))
    if n_tokens == 1:
        n_chunks, step = (n_keys + KEYS - 1) // KEYS, part_bytes(n_heads, rank)
        a = take(ws, n_chunks * step)
        put(shared, PARTS, a)
        run_items(ws, ATTEND_CHUNKS, shared, n_chunks, threads)
        for i in range(1, n_chunks):
            b = a + step * i
            join(a, a + 4 * n_heads, a + 8 * n_heads, n_heads, rank, b, b + 4 * n_heads, b + 8 * n_heads)
        divide(a + 4 * n_heads, a + 8 * n_heads, n_heads, rank, out)
    else:
        run_items(ws, ATTEND_TOKENS, shared, (n_tokens + TOKEN_BLOCK - 1) // TOKEN_BLOCK, threads)
    release(ws, at)
