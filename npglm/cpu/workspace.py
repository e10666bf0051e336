"""The op set's one block of memory, handed out as a stack, and the facts that kernels need besides their arguments.

A workspace is an int64 array; kernels get its address. The memory is host.address_space(): pages come into being at their first use
and are used again by the next token.
"""

from npglm.cpu.jit import inner
from npglm.cpu.simd import load_field, store_field

BASE, TOP, SIZE, THREADS, EXACT, FAILED = range(6)
KERNELS = 8  # from here on, addresses of kernels, in the order of products.KERNELS and of others that ops.py appends
FIELDS = 24


@inner
def take(ws, n_bytes):
    """Address of n_bytes, 64-aligned. Raises MemoryError when the address space ends."""
    address = load_field(ws, TOP)
    top = address + (n_bytes + 63 & -64)
    if top > load_field(ws, BASE) + load_field(ws, SIZE):
        store_field(ws, FAILED, 1)
        raise MemoryError("npglm.cpu: the workspace is full")
    store_field(ws, TOP, top)
    return address


@inner
def mark(ws):
    """What release() goes back to."""
    return load_field(ws, TOP)


@inner
def release(ws, at):
    store_field(ws, TOP, at)


@inner
def n_threads(ws):
    return load_field(ws, THREADS)


@inner
def exact(ws):
    """f32 numerics: activations are not quantised."""
    return load_field(ws, EXACT)
