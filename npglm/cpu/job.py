"""A job: one matrix times some rows of activations, as a row of int64 fields that kernels read by address."""

from npglm.cpu.jit import inner
from npglm.cpu.simd import copy_fields, load_field, store_field

# Of the matrix: W address, KIND (GGUF type id), ROW_BYTES, CHUNK_BYTES (of 256 weights), N columns, ROWS, UNPACK (decoder's address).
# Of the product: X address of f32 rows, X_STRIDE bytes, Y address of f32 rows, Y_STRIDE bytes, TOKENS; LIST: address of int64
# [TOKENS], which rows of X (0: the first TOKENS), SOURCES: how many rows X has. Filled in by products(): FORM, RECORDS, PANELS.
(
    W, KIND, ROW_BYTES, CHUNK_BYTES, N, ROWS, UNPACK,
    X, X_STRIDE, Y, Y_STRIDE, TOKENS, LIST, SOURCES, FORM, RECORDS, PANELS,
) = range(17)  # fmt: skip
FIELDS = 18
MATRIX_FIELDS = 8  # the last is not used: a matrix fills a vector of eight
BYTES = 8 * FIELDS


get, put = load_field, store_field  # (job, field), (job, field, value)


@inner
def make(job, matrix, x, x_stride, y, y_stride, n_tokens):
    """Write a job for the matrix (MATRIX_FIELDS int64 at an address)."""
    copy_fields(job, matrix)  # MATRIX_FIELDS; X is overwritten
    put(job, X, x)
    put(job, X_STRIDE, x_stride)
    put(job, Y, y)
    put(job, Y_STRIDE, y_stride)
    put(job, TOKENS, n_tokens)
    put(job, LIST, 0)
    put(job, SOURCES, n_tokens)


@inner
def cut(job, first_row, n_rows):
    """Keep only these rows of the job's matrix: one head, one expert."""
    put(job, W, get(job, W) + first_row * get(job, ROW_BYTES))
    put(job, ROWS, n_rows)
