"""The DSA indexer: scores of every cached token and the choice of the top-k."""

import numpy as np

from npglm.cpu.attention import (
    KEYS,
    SHARED_BYTES,
    blocks,
    keys_bytes,
    load_keys,
    next_item,
    pack_heads,
    panels_bytes,
    run_items,
)
from npglm.cpu.jit import entry, inner, kernel
from npglm.cpu.job import get, put
from npglm.cpu.simd import TOKENS as WIDTH
from npglm.cpu.simd import (
    as_i32,
    load_f32,
    load_i32,
    load_i64,
    splat_f32x16,
    store_f32,
    store_f32x16,
    store_i32,
    store_i64,
    tile_relu_dot,
)
from npglm.cpu.tiles import multiply_f32
from npglm.cpu.workspace import mark, n_threads, release, take

ITEM_KEYS = 64  # of the scores
MINUS_INF = np.float32(-np.inf)

# What the kernels get: addresses, sizes in elements. SCORE has rows of S numbers, CHOSEN of K.
WS, Q, CACHE, WEIGHTS, POS, SCORE, CHOSEN, T, HEADS, DIM, S, K, CACHE_BYTES, PANELS, SCRATCHES, SCRATCH_BYTES, N_ITEMS = range(
    17
)


@kernel
def pack_indexer(shared, thread):
    """Items are tokens: their queries as panels, then their weights, padded with zeros to whole panels."""
    n_heads, n = get(shared, HEADS), get(shared, DIM)
    step = token_bytes(n_heads, n)
    while True:
        t = next_item(shared)
        if t >= get(shared, T):
            return
        panels = get(shared, PANELS) + step * t
        pack_heads(get(shared, Q) + 4 * n_heads * n * t, n_heads, n, np.float32(1), panels)
        weights = panels + panels_bytes(n_heads, n)
        for h in range((n_heads + WIDTH - 1) // WIDTH * WIDTH):
            store_f32(weights + 4 * h, load_f32(get(shared, WEIGHTS) + 4 * (n_heads * t + h)) if h < n_heads else np.float32(0))


@inner
def token_bytes(n_heads, n):
    return panels_bytes(n_heads, n) + panels_bytes(n_heads, 1)


@kernel
def score_keys(shared, thread):
    """Items are ITEM_KEYS cached tokens: their scores for every query. -inf after the query's position."""
    n_heads, n, n_cached = get(shared, HEADS), get(shared, DIM), get(shared, S)
    rows = get(shared, SCRATCHES) + thread * get(shared, SCRATCH_BYTES)
    columns = rows + keys_bytes(n) // 2
    indices = columns + keys_bytes(n) // 2
    while True:
        item = next_item(shared)
        if item >= get(shared, N_ITEMS):
            return
        first, last_pos = item * ITEM_KEYS, n_cached - 1
        n_keys = min(ITEM_KEYS, n_cached - first)
        for i in range(n_keys):
            store_i64(indices + 8 * i, first + i)
        load_keys(get(shared, CACHE), get(shared, CACHE_BYTES), n, indices, n_keys, rows, columns)
        for t in range(get(shared, T)):
            pos, score = load_i32(get(shared, POS) + 4 * t), get(shared, SCORE) + 4 * n_cached * t
            panels = get(shared, PANELS) + token_bytes(n_heads, n) * t
            for b in range(blocks(n_keys)):
                s = first + 16 * b
                acc = splat_f32x16(np.float32(0))
                if s <= pos:
                    panel, weights = panels, panels + panels_bytes(n_heads, n)
                    for _ in range(0, n_heads, WIDTH):
                        tile = multiply_f32(columns + 1024 * blocks(n) * b, panel, n)
                        acc = tile_relu_dot(acc, tile, weights)
                        panel, weights = panel + 4 * WIDTH * n, weights + 4 * WIDTH
                if s + 15 <= min(pos, last_pos):
                    store_f32x16(score + 4 * s, acc)
                    continue
                store_f32x16(rows, acc)  # the rows are no longer needed: their transpose is
                for i in range(s, min(s + 16, n_cached)):
                    store_f32(score + 4 * i, load_f32(rows + 4 * (i - s)) if i <= pos else MINUS_INF)


@entry
def run_scores(ws, q, cache, cache_bytes, weights, pos, score, n_tokens, n_heads, n, n_cached):
    """q f32 [T,I,J] and so on, by address -> score f32 [T,S]."""
    at = mark(ws)
    shared, threads = take(ws, SHARED_BYTES), n_threads(ws)
    put(shared, WS, ws)
    put(shared, Q, q)
    put(shared, CACHE, cache)
    put(shared, CACHE_BYTES, cache_bytes)
    put(shared, WEIGHTS, weights)
    put(shared, POS, pos)
    put(shared, SCORE, score)
    put(shared, T, n_tokens)
    put(shared, HEADS, n_heads)
    put(shared, DIM, n)
    put(shared, S, n_cached)
    put(shared, PANELS, take(ws, token_bytes(n_heads, n) * n_tokens))
    scratch = keys_bytes(n) + 8 * KEYS
    put(shared, SCRATCH_BYTES, scratch)
    put(shared, SCRATCHES, take(ws, scratch * threads))
    run_items(ws, PACK_INDEXER, shared, n_tokens, threads)
    n_items = (n_cached + ITEM_KEYS - 1) // ITEM_KEYS
    run_items(ws, SCORE_KEYS, shared, n_items, threads if n_items * n_tokens > 4 else 1)
    release(ws, at)


# --- top-k ------------------------------------------------------------------------------------------------------------------


@inner
def order(v):
    """A number that grows with v, 0 for NaN; of the same value for 0 and -0."""
    if np.isnan(v):
        return 0
    bits = as_i32(v + np.float32(0)) & 0xFFFFFFFF
    return (bits ^ 0xFFFFFFFF) if bits >> 31 else (bits | 0x80000000)


@inner
def choose(score, n, width, counts, chosen):
    """The `width` largest of f32 [n] -> int32 [width]: ascending, -1 at the end; lower indices first among equals; never NaN.

    A radix select: the value of the width-th largest is found 8 bits at a time. counts: 2 KiB.
    """
    n_valid = 0
    for i in range(n):
        n_valid += order(load_f32(score + 4 * i)) != 0
    want = min(width, n_valid)
    limit, ties = 0, 0
    if want == n_valid:
        limit, ties = 0, 0
    else:
        missing = want
        for shift in (24, 16, 8, 0):
            for i in range(256):
                store_i64(counts + 8 * i, 0)
            for i in range(n):
                key = order(load_f32(score + 4 * i))
                if key >> (shift + 8) == limit >> (shift + 8):
                    at = counts + 8 * ((key >> shift) & 255)
                    store_i64(at, load_i64(at) + 1)
            digit = 255
            while load_i64(counts + 8 * digit) < missing:
                missing -= load_i64(counts + 8 * digit)
                digit -= 1
            limit |= digit << shift
        ties = missing
    to = 0
    for i in range(n):
        key = order(load_f32(score + 4 * i))
        take_it = key > limit
        if key == limit and ties > 0:
            take_it, ties = True, ties - 1
        if take_it:
            store_i32(chosen + 4 * to, i)
            to += 1
    for i in range(to, width):
        store_i32(chosen + 4 * i, -1)


@kernel
def choose_keys(shared, thread):
    """Items are tokens."""
    counts = get(shared, SCRATCHES) + thread * get(shared, SCRATCH_BYTES)
    n_cached, width = get(shared, S), get(shared, K)
    while True:
        t = next_item(shared)
        if t >= get(shared, N_ITEMS):
            return
        pos = load_i32(get(shared, POS) + 4 * t)
        choose(get(shared, SCORE) + 4 * n_cached * t, pos + 1, width, counts, get(shared, CHOSEN) + 4 * width * t)


@entry
def run_top_k(ws, score, pos, chosen, n_tokens, n_cached, width):
    """score f32 [T,S], pos int32 [T] -> chosen int32 [T,width], by address."""
    at = mark(ws)
    shared, threads = take(ws, SHARED_BYTES), n_threads(ws)
    put(shared, SCORE, score)
    put(shared, POS, pos)
    put(shared, CHOSEN, chosen)
    put(shared, S, n_cached)
    put(shared, K, width)
    put(shared, SCRATCH_BYTES, 2048)
    put(shared, SCRATCHES, take(ws, 2048 * threads))
    run_items(ws, CHOOSE_KEYS, shared, n_tokens, threads)
    release(ws, at)


KERNELS = (pack_indexer, score_keys, choose_keys)
PACK_INDEXER, SCORE_KEYS, CHOOSE_KEYS = 8, 9, 10  # where ops.py puts them, after attention.KERNELS
