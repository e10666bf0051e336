"""The op set's one block of memory, handed out as a stack, and the facts that kernels need besides their arguments.

A workspace is an int64 array; kernels get its address. Nothing is allocated per token: Python reserves before it calls.
"""

from npglm.cpu.jit import inner
from npglm.cpu.simd import load_i64, store_i64

BASE, TOP, SIZE, THREADS, EXACT, FAILED = range(6)
KERNELS = 8  # from here on, addresses of kernels, in the order of products.KERNELS and of others that ops.py appends
FIELDS = 24


@inner
def take(ws, n_bytes):
    """Address of n_bytes, 64-aligned. Raises MemoryError when the reserve is too small."""
    address = load_i64(ws + 8 * TOP)
    top = address + (n_bytes + 63) // 64 * 64
    if top > load_i64(ws + 8 * BASE) + load_i64(ws + 8 * SIZE):
        store_i64(ws + 8 * FAILED, 1)
        raise MemoryError("npglm.cpu: workspace too small")
    store_i64(ws + 8 * TOP, top)
    return address


@inner
def mark(ws):
    """What release() goes back to."""
    return load_i64(ws + 8 * TOP)


@inner
def release(ws, at):
    store_i64(ws + 8 * TOP, at)


@inner
def n_threads(ws):
    return load_i64(ws + 8 * THREADS)


@inner
def exact(ws):
    """f32 numerics: activations are not quantised."""
    return load_i64(ws + 8 * EXACT)
