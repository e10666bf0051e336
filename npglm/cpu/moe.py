"""The FFNs: router, routed experts (tokens grouped by expert), the shared expert and the dense FFN. By address."""

import numpy as np

from npglm.cpu import job
from npglm.cpu.elementwise import add, sigmoid, swiglu
from npglm.cpu.jit import entry, inner
from npglm.cpu.job import BYTES, LIST, MATRIX_FIELDS, ROWS, SOURCES, TOKENS, cut, get, make, put
from npglm.cpu.products import run_products
from npglm.cpu.simd import (
    fma_f32,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    splat_f32x16,
    store_f32,
    store_f32x16,
    store_i32,
    store_i64,
)
from npglm.cpu.weights import INDEX
from npglm.cpu.workspace import mark, release, take

GATE_EXPS, UP_EXPS, DOWN_EXPS = INDEX["ffn_gate_exps"], INDEX["ffn_up_exps"], INDEX["ffn_down_exps"]
GATE_SHEXP, UP_SHEXP, DOWN_SHEXP = INDEX["ffn_gate_shexp"], INDEX["ffn_up_shexp"], INDEX["ffn_down_shexp"]
GATE, UP, DOWN = INDEX["ffn_gate"], INDEX["ffn_up"], INDEX["ffn_down"]
MIN_WEIGHT_SUM = np.float32(6.103515625e-5)  # reference/ops/moe.py


@inner
def tensor(table, index):
    """Address of one matrix's fields in a layer's table."""
    return table + 8 * MATRIX_FIELDS * index


@inner
def select_experts(score, n, k, chosen):
    """The k largest of f32 [n] -> int32 [k]: score descending, then index ascending, NaN last."""
    for i in range(k):
        best, best_score = -1, np.float32(0)
        for e in range(n):
            v = load_f32(score + 4 * e)
            if best >= 0 and not (v > best_score or (np.isnan(best_score) and not np.isnan(v))):
                continue
            taken = False
            for j in range(i):
                taken = taken or load_i32(chosen + 4 * j) == e
            if not taken:
                best, best_score = e, v
        store_i32(chosen + 4 * i, best)


@inner
def route(ws, logits, bias, n_experts, k, norm, scale, experts, weights):
    """One token: logits f32 [E] -> experts int32 [K], weights f32 [K]. bias: address or 0."""
    at = mark(ws)
    probs, biased = take(ws, 4 * n_experts), take(ws, 4 * n_experts)
    sigmoid(logits, n_experts, probs)
    if bias:
        add(probs, bias, n_experts, biased)
    select_experts(biased if bias else probs, n_experts, k, experts)
    total = np.float32(0)
    for i in range(k):
        total += load_f32(probs + 4 * load_i32(experts + 4 * i))
    total = max(total, MIN_WEIGHT_SUM)
    for i in range(k):
        v = load_f32(probs + 4 * load_i32(experts + 4 * i))
        store_f32(weights + 4 * i, (v / total if norm else v) * scale)
    release(ws, at)


@inner
def combine(y, order, experts, weights, k, n, out):
    """sum over i of weights[i] * y[order[i]] (order int64 at an address, or 0: 0..k) -> out f32 [n], in the order of i.

    experts int32 [k] at an address, or 0: those that are -1 are left out."""
    whole = n // 16 * 16
    for c in range(0, whole, 16):
        total = splat_f32x16(np.float32(0))
        for i in range(k):
            if not experts or load_i32(experts + 4 * i) >= 0:
                at = y + 4 * (n * (load_i64(order + 8 * i) if order else i) + c)
                total = fma_f32x16(load_f32x16(at), splat_f32x16(load_f32(weights + 4 * i)), total)
        store_f32x16(out + 4 * c, total)
    for c in range(whole, n):
        sum = np.float32(0)
        for i in range(k):
            if not experts or load_i32(experts + 4 * i) >= 0:
                at = y + 4 * (n * (load_i64(order + 8 * i) if order else i) + c)
                sum = fma_f32(load_f32(at), load_f32(weights + 4 * i), sum)
        store_f32(out + 4 * c, sum)


# --- tokens by expert -------------------------------------------------------------------------------------------------------
# Pairs (token, one of its K experts) are numbered t * K + i. Sorted by expert, pair p stands at place[p], and expert e's are
# first[e] .. first[e+1]. Pairs whose expert is -1 (not on this rank) have no place: there are first[E] others.


@inner
def sort_pairs(experts, n_pairs, n_experts, first, place, pair_of):
    """experts int32 [pairs] -> first int64 [E+1], place and its inverse pair_of int64 [pairs]. Stable."""
    for e in range(n_experts + 1):
        store_i64(first + 8 * e, 0)
    for p in range(n_pairs):
        if load_i32(experts + 4 * p) >= 0:
            at = first + 8 * (load_i32(experts + 4 * p) + 1)
            store_i64(at, load_i64(at) + 1)
    for e in range(n_experts):
        store_i64(first + 8 * e + 8, load_i64(first + 8 * e + 8) + load_i64(first + 8 * e))
    for p in range(n_pairs):
        if load_i32(experts + 4 * p) < 0:
            continue
        at = first + 8 * load_i32(experts + 4 * p)
        to = load_i64(at)
        store_i64(place + 8 * p, to)
        store_i64(pair_of + 8 * to, p)
        store_i64(at, to + 1)
    for e in range(n_experts, 0, -1):
        store_i64(first + 8 * e, load_i64(first + 8 * e - 8))
    store_i64(first, 0)


@inner
def expert_jobs(jobs, matrix, n_experts, first, sources, n_sources, x, y):
    """One job for each expert that was chosen; its rows of x f32 [n_sources][in] are sources int64 [pairs] (0: sorted already), y is
    f32 [pairs][out], sorted. Returns the number of jobs."""
    n_jobs, n_out = 0, get(matrix, ROWS) // n_experts
    for e in range(n_experts):
        start = load_i64(first + 8 * e)
        count = load_i64(first + 8 * e + 8) - start
        if count == 0:
            continue
        j = jobs + BYTES * n_jobs
        x_stride = 4 * get(matrix, job.N)
        make(j, matrix, x if sources else x + x_stride * start, x_stride, y + 4 * n_out * start, 4 * n_out, count)
        cut(j, e * n_out, n_out)
        if sources:
            put(j, LIST, sources + 8 * start)
            put(j, SOURCES, n_sources)
        put(j, TOKENS, count)
        n_jobs += 1
    return n_jobs


@inner
def one_token_jobs(jobs, matrix, n_experts, experts, k, x, x_stride, y, y_stride):
    """A job for each of one token's experts that is here; x_stride 0: they share the row. Returns the number of jobs."""
    n_out, n_jobs = get(matrix, ROWS) // n_experts, 0
    for i in range(k):
        if load_i32(experts + 4 * i) < 0:
            continue
        j = jobs + BYTES * n_jobs
        make(j, matrix, x + x_stride * i, 0, y + y_stride * i, 0, 1)
        cut(j, n_out * load_i32(experts + 4 * i), n_out)
        n_jobs += 1
    return n_jobs


@entry
def linear_experts(ws, x, per_pair, matrix, n_experts, experts, n_tokens, k, y):
    """x f32 [T][in] (per_pair: [T][K][in]), experts int32 [T,K] -> y f32 [T][K][out], 0 where the expert is -1."""
    at = mark(ws)
    n_in, n_out, n_pairs = get(matrix, job.N), get(matrix, ROWS) // n_experts, n_tokens * k
    if n_tokens == 1:
        jobs = take(ws, BYTES * k)
        n_jobs = one_token_jobs(jobs, matrix, n_experts, experts, k, x, 4 * n_in * per_pair, y, 4 * n_out)
        run_products(ws, jobs, n_jobs)
    else:
        jobs, first = take(ws, BYTES * min(n_experts, n_pairs)), take(ws, 8 * (n_experts + 1))
        place, pair_of = take(ws, 8 * n_pairs), take(ws, 8 * n_pairs)
        sort_pairs(experts, n_pairs, n_experts, first, place, pair_of)
        if not per_pair:
            for i in range(load_i64(first + 8 * n_experts)):
                store_i64(pair_of + 8 * i, load_i64(pair_of + 8 * i) // k)
        sorted_y = take(ws, 4 * n_pairs * n_out)
        n_jobs = expert_jobs(jobs, matrix, n_experts, first, pair_of, n_pairs if per_pair else n_tokens, x, sorted_y)
        run_products(ws, jobs, n_jobs)
        for p in range(n_pairs):
            if load_i32(experts + 4 * p) >= 0:
                row = sorted_y + 4 * n_out * load_i64(place + 8 * p)
                for c in range(n_out):
                    store_f32(y + 4 * (n_out * p + c), load_f32(row + 4 * c))
    for p in range(n_pairs):
        if load_i32(experts + 4 * p) < 0:
            for c in range(n_out):
                store_f32(y + 4 * (n_out * p + c), np.float32(0))
    release(ws, at)


# --- whole FFNs -------------------------------------------------------------------------------------------------------------


@entry
def gate_up_swiglu(ws, h, n_tokens, gate, up, y):
    """h f32 [T][D] -> y f32 [T][F]."""
    at = mark(ws)
    n_in, n_out = get(gate, job.N), get(gate, ROWS)
    jobs, u = take(ws, 2 * BYTES), take(ws, 4 * n_tokens * n_out)
    make(jobs, gate, h, 4 * n_in, y, 4 * n_out, n_tokens)
    make(jobs + BYTES, up, h, 4 * n_in, u, 4 * n_out, n_tokens)
    run_products(ws, jobs, 2)
    swiglu(y, u, n_tokens * n_out, y)
    release(ws, at)


@entry
def dense_ffn(ws, h, n_tokens, table, out):
    """h f32 [T][D] -> out f32 [T][D]."""
    at = mark(ws)
    down, n_ffn = tensor(table, DOWN), get(tensor(table, GATE), ROWS)
    x, jobs = take(ws, 4 * n_tokens * n_ffn), take(ws, BYTES)
    gate_up_swiglu(ws, h, n_tokens, tensor(table, GATE), tensor(table, UP), x)
    make(jobs, down, x, 4 * n_ffn, out, 4 * get(down, ROWS), n_tokens)
    run_products(ws, jobs, 1)
    release(ws, at)


@entry
def moe_experts(ws, h, n_tokens, table, n_experts, experts, weights, k, out):
    """h f32 [T][D], experts int32 [T,K], weights f32 [T,K] -> out f32 [T][D]: routed experts (-1: not here) and the shared one, if the
    table has it. Two rounds of products, each over all threads at once."""
    at = mark(ws)
    n, n_pairs = get(tensor(table, GATE_EXPS), job.N), n_tokens * k
    n_ffn, n_shared = get(tensor(table, GATE_EXPS), ROWS) // n_experts, get(tensor(table, GATE_SHEXP), ROWS)
    jobs = take(ws, BYTES * (2 * max(min(n_experts, n_pairs), k) + 2))
    shared_gate, shared_up = take(ws, 4 * n_tokens * n_shared), take(ws, 4 * n_tokens * n_shared)
    gate, up, down = take(ws, 4 * n_pairs * n_ffn), take(ws, 4 * n_pairs * n_ffn), take(ws, 4 * n_pairs * n)
    first, place = take(ws, 8 * (n_experts + 1)), take(ws, 8 * n_pairs)
    sources = take(ws, 8 * n_pairs)
    if n_tokens == 1:
        n_jobs = one_token_jobs(jobs, tensor(table, GATE_EXPS), n_experts, experts, k, h, 0, gate, 4 * n_ffn)
        one_token_jobs(jobs + BYTES * n_jobs, tensor(table, UP_EXPS), n_experts, experts, k, h, 0, up, 4 * n_ffn)
    else:
        sort_pairs(experts, n_pairs, n_experts, first, place, sources)
        n_pairs = load_i64(first + 8 * n_experts)  # that are here
        for p in range(n_pairs):
            store_i64(sources + 8 * p, load_i64(sources + 8 * p) // k)
        n_jobs = expert_jobs(jobs, tensor(table, GATE_EXPS), n_experts, first, sources, n_tokens, h, gate)
        expert_jobs(jobs + BYTES * n_jobs, tensor(table, UP_EXPS), n_experts, first, sources, n_tokens, h, up)
        _pair_up(ws, jobs, n_jobs)
    shared = jobs + BYTES * 2 * n_jobs
    if n_shared:
        make(shared, tensor(table, GATE_SHEXP), h, 4 * n, shared_gate, 4 * n_shared, n_tokens)
        make(shared + BYTES, tensor(table, UP_SHEXP), h, 4 * n, shared_up, 4 * n_shared, n_tokens)
    run_products(ws, jobs, 2 * n_jobs + (2 if n_shared else 0))
    swiglu(shared_gate, shared_up, n_tokens * n_shared, shared_gate)
    if n_tokens == 1:
        for i in range(k):
            if load_i32(experts + 4 * i) >= 0:
                swiglu(gate + 4 * n_ffn * i, up + 4 * n_ffn * i, n_ffn, gate + 4 * n_ffn * i)
        one_token_jobs(jobs, tensor(table, DOWN_EXPS), n_experts, experts, k, gate, 4 * n_ffn, down, 4 * n)
    else:
        swiglu(gate, up, n_pairs * n_ffn, gate)
        expert_jobs(jobs, tensor(table, DOWN_EXPS), n_experts, first, 0, 0, gate, down)
    shared_down = take(ws, 4 * n_tokens * n)
    if n_shared:
        make(jobs + BYTES * n_jobs, tensor(table, DOWN_SHEXP), shared_gate, 4 * n_shared, shared_down, 4 * n, n_tokens)
    run_products(ws, jobs, n_jobs + (1 if n_shared else 0))
    for t in range(n_tokens):
        order = place + 8 * k * t if n_tokens > 1 else 0
        to = out + 4 * n * t
        combine(down, order, experts + 4 * k * t, weights + 4 * k * t, k, n, to)
        if n_shared:
            add(to, shared_down + 4 * n * t, n, to)
    release(ws, at)


@inner
def _pair_up(ws, jobs, n):
    """n jobs of the gates, then n of the ups -> each gate beside its up, so that they share panels."""
    at = mark(ws)
    spare = take(ws, 2 * n * BYTES)
    for i in range(2 * n):
        to = spare + BYTES * (2 * i if i < n else 2 * (i - n) + 1)
        for field in range(job.FIELDS):
            put(to, field, get(jobs + BYTES * i, field))
    for i in range(2 * n * job.FIELDS):
        store_i64(jobs + 8 * i, load_i64(spare + 8 * i))
    release(ws, at)
