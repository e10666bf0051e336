"""What Python calls: one compiled function a verb. All arguments are numbers; arrays come as addresses of C-contiguous f32."""

import math

import numpy as np

from npglm.cpu import elementwise, indexer, moe
from npglm.cpu.activations import quantize_q8_0, quantize_q8_k
from npglm.cpu.attention import run_attention
from npglm.cpu.jit import entry
from npglm.cpu.job import BYTES, ROWS, N, W, cut, get, make
from npglm.cpu.moe import tensor
from npglm.cpu.products import run_products
from npglm.cpu.simd import load_f32, load_f64, load_i8, load_i32, store_f32, store_i8, store_i32
from npglm.cpu.weights import INDEX
from npglm.cpu.workspace import mark, release, take

Q_A, Q_A_NORM, Q_B, K_B = INDEX["attn_q_a"], INDEX["attn_q_a_norm"], INDEX["attn_q_b"], INDEX["attn_k_b"]
KV_A, KV_A_NORM = INDEX["attn_kv_a_mqa"], INDEX["attn_kv_a_norm"]
INDEX_K, INDEX_NORM, INDEX_BIAS = INDEX["indexer_attn_k"], INDEX["indexer_k_norm"], INDEX["indexer_k_norm_bias"]
INDEX_Q, INDEX_PROJ = INDEX["indexer_attn_q_b"], INDEX["indexer_proj"]


@entry
def rope_table(pos, frequency, n_tokens, n_pairs, cos, sin):
    """pos int32 [T], frequency f64 [P/2] -> cos, sin f32 [T][P/2]."""
    for t in range(n_tokens):
        for i in range(n_pairs):
            angle = load_i32(pos + 4 * t) * load_f64(frequency + 8 * i)
            store_f32(cos + 4 * (n_pairs * t + i), np.float32(math.cos(angle)))  # round: f32, once
            store_f32(sin + 4 * (n_pairs * t + i), np.float32(math.sin(angle)))


@entry
def embed(ws, tokens, n_tokens, matrix, y):
    at = mark(ws)
    spare = take(ws, 1024)
    for t in range(n_tokens):
        elementwise.decode_row(matrix, load_i32(tokens + 4 * t), y + 4 * get(matrix, N) * t, spare)
    release(ws, at)


@entry
def rms_norm(x, n_rows, matrix, eps, y):
    n, weight = get(matrix, N), get(matrix, W)
    for t in range(n_rows):
        elementwise.rms_norm(x + 4 * n * t, weight, np.float32(eps), n, y + 4 * n * t)


@entry
def layer_norm(x, n_rows, matrix, bias, eps, y):
    n = get(matrix, N)
    for t in range(n_rows):
        elementwise.layer_norm(x + 4 * n * t, get(matrix, W), get(bias, W), np.float32(eps), n, y + 4 * n * t)


@entry
def rope(x, cos, sin, n_tokens, n_rows, n, y):
    """n_rows rows of n for each token."""
    for t in range(n_tokens):
        table = 4 * (n // 2) * t
        for i in range(n_rows * t, n_rows * t + n_rows):
            elementwise.rope(x + 4 * n * i, cos + table, sin + table, n, y + 4 * n * i)


@entry
def add(x, y, n, out):
    elementwise.add(x, y, n, out)


@entry
def sigmoid(x, n, y):
    elementwise.sigmoid(x, n, y)


@entry
def swiglu(gate, up, n, y):
    elementwise.swiglu(gate, up, n, y)


@entry
def store(cache, rows, pos, n_tokens, n, number_bytes):
    for t in range(n_tokens):
        elementwise.store_row(rows + 4 * n * t, n, number_bytes, cache + number_bytes * n * load_i32(pos + 4 * t))


@entry
def quantize(ws, x, n_blocks, block, q, d):
    """For tests: blocks of 32 (Q8_0) or 256 (Q8_K), one by one -> q int8, d f32 [blocks]."""
    at = mark(ws)
    record = take(ws, 4 * block)
    for b in range(n_blocks):
        if block == 32:
            quantize_q8_0(x + 128 * b, record, 32)
        else:
            quantize_q8_k(x + 1024 * b, record, 256)
        for i in range(block):
            store_i8(q + block * b + i, load_i8(record + i))
        store_f32(d + 4 * b, load_f32(record + block))
    release(ws, at)


@entry
def linear(ws, x, n_tokens, matrix, y):
    at = mark(ws)
    job = take(ws, BYTES)
    make(job, matrix, x, 4 * get(matrix, N), y, 4 * get(matrix, ROWS), n_tokens)
    run_products(ws, job, 1)
    release(ws, at)


@entry
def linear_heads(ws, x, n_tokens, n_heads, matrix, y):
    """x f32 [T][H][in] -> y f32 [T][H][out]."""
    at = mark(ws)
    n_in, n_out = get(matrix, N), get(matrix, ROWS) // n_heads
    jobs = take(ws, BYTES * n_heads)
    for h in range(n_heads):
        job = jobs + BYTES * h
        make(job, matrix, x + 4 * n_in * h, 4 * n_in * n_heads, y + 4 * n_out * h, 4 * n_out * n_heads, n_tokens)
        cut(job, h * n_out, n_out)
    run_products(ws, jobs, n_heads)
    release(ws, at)


@entry
def queries(ws, h, n_tokens, table, cos, sin, n_heads, nope, n_rope, rank, eps, q_a, q):
    """h f32 [T][D] -> q_a f32 [T][Q], q f32 [T][H][R+P]."""
    at = mark(ws)
    a, b, k_b = tensor(table, Q_A), tensor(table, Q_B), tensor(table, K_B)
    n_q, head, width = get(a, ROWS), nope + n_rope, rank + n_rope
    jobs, both = take(ws, BYTES * n_heads), take(ws, 4 * n_tokens * n_heads * head)
    make(jobs, a, h, 4 * get(a, N), q_a, 4 * n_q, n_tokens)
    run_products(ws, jobs, 1)
    for t in range(n_tokens):
        row = q_a + 4 * n_q * t
        elementwise.rms_norm(row, get(tensor(table, Q_A_NORM), W), np.float32(eps), n_q, row)
    make(jobs, b, q_a, 4 * n_q, both, 4 * n_heads * head, n_tokens)
    run_products(ws, jobs, 1)
    for t in range(n_tokens):
        angle = 4 * (n_rope // 2) * t
        for i in range(n_heads * t, n_heads * t + n_heads):
            pe = both + 4 * (head * i + nope)
            elementwise.rope(pe, cos + angle, sin + angle, n_rope, q + 4 * (width * i + rank))
    for i in range(n_heads):
        job = jobs + BYTES * i
        make(job, k_b, both + 4 * head * i, 4 * head * n_heads, q + 4 * width * i, 4 * width * n_heads, n_tokens)
        cut(job, rank * i, rank)
    run_products(ws, jobs, n_heads)
    release(ws, at)


@entry
def latents(ws, h, n_tokens, table, cos, sin, rank, n_rope, eps, y):
    """h f32 [T][D] -> y f32 [T][R+P]."""
    at = mark(ws)
    a, n = tensor(table, KV_A), rank + n_rope
    job = take(ws, BYTES)
    make(job, a, h, 4 * get(a, N), y, 4 * n, n_tokens)
    run_products(ws, job, 1)
    for t in range(n_tokens):
        row, angle = y + 4 * n * t, 4 * (n_rope // 2) * t
        elementwise.rms_norm(row, get(tensor(table, KV_A_NORM), W), np.float32(eps), rank, row)
        elementwise.rope(row + 4 * rank, cos + angle, sin + angle, n_rope, row + 4 * rank)
    release(ws, at)


@entry
def index(
    ws, h, q_a, n_tokens, table, cache, number_bytes, cos, sin, pos, n_heads, n, n_rope, eps, scale, n_cached, width, chosen
):
    """The whole indexer: stores this call's keys, then scores and chooses -> chosen int32 [T][width]."""
    at = mark(ws)
    k_a, q_b, proj = tensor(table, INDEX_K), tensor(table, INDEX_Q), tensor(table, INDEX_PROJ)
    jobs, keys = take(ws, 3 * BYTES), take(ws, 4 * n_tokens * n)
    q, weights = take(ws, 4 * n_tokens * n_heads * n), take(ws, 4 * n_tokens * n_heads)
    make(jobs, k_a, h, 4 * get(k_a, N), keys, 4 * n, n_tokens)
    make(jobs + BYTES, proj, h, 4 * get(proj, N), weights, 4 * n_heads, n_tokens)
    make(jobs + 2 * BYTES, q_b, q_a, 4 * get(q_b, N), q, 4 * n_heads * n, n_tokens)
    everything = n_cached <= width  # whatever the scores are, all are chosen
    run_products(ws, jobs, 1 if everything else 3)
    norm, bias = get(tensor(table, INDEX_NORM), W), get(tensor(table, INDEX_BIAS), W)
    for t in range(n_tokens):
        angle, key = 4 * (n_rope // 2) * t, keys + 4 * n * t
        elementwise.layer_norm(key, norm, bias, np.float32(eps), n, key)
        elementwise.rope(key, cos + angle, sin + angle, n_rope, key)
        elementwise.store_row(key, n, number_bytes, cache + number_bytes * n * load_i32(pos + 4 * t))
        if everything:
            last = load_i32(pos + 4 * t)
            for i in range(width):
                store_i32(chosen + 4 * (width * t + i), i if i <= last else -1)
            continue
        for i in range(n_heads * t, n_heads * t + n_heads):
            elementwise.rope(q + 4 * n * i, cos + angle, sin + angle, n_rope, q + 4 * n * i)
            store_f32(weights + 4 * i, load_f32(weights + 4 * i) * np.float32(scale))
    if not everything:
        score = take(ws, 4 * n_tokens * n_cached)
        indexer.run_scores(ws, q, cache, number_bytes, weights, pos, score, n_tokens, n_heads, n, n_cached)
        indexer.run_top_k(ws, score, pos, chosen, n_tokens, n_cached, width)
    release(ws, at)


@entry
def select_experts(score, n_tokens, n, k, chosen):
    for t in range(n_tokens):
        moe.select_experts(score + 4 * n * t, n, k, chosen + 4 * k * t)


@entry
def route(ws, logits, bias, n_tokens, n_experts, k, norm, scale, experts, weights):
    for t in range(n_tokens):
        to = 4 * k * t
        moe.route(ws, logits + 4 * n_experts * t, bias, n_experts, k, norm, np.float32(scale), experts + to, weights + to)


@entry
def combine_experts(y, weights, n_tokens, k, n, out):
    for t in range(n_tokens):
        moe.combine(y + 4 * n * k * t, 0, 0, weights + 4 * k * t, k, n, out + 4 * n * t)


attention, indexer_score, select_top_k = run_attention, indexer.run_scores, indexer.run_top_k
linear_experts, gate_up_swiglu, dense_ffn, moe_experts = moe.linear_experts, moe.gate_up_swiglu, moe.dense_ffn, moe.moe_experts

# What forward() calls when nobody probes.
FORWARD = (
    rope_table, embed, rms_norm, queries, latents, store, index, attention, linear_heads, linear, add, route, dense_ffn, moe_experts,
)  # fmt: skip
