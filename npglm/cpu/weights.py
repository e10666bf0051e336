"""Weights as the kernels see them: the mapped bytes, in place, and a row of int64 that names them."""

from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from npglm.cpu import job
from npglm.cpu.blocks import BLOCK, BLOCK_BYTES, SUPPORTED, unpacker
from npglm.errors import NpglmError

# The order of a layer's table; what a layer lacks is zero.
TENSORS = (
    "attn_norm", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output",
    "ffn_norm", "indexer_attn_q_b", "indexer_attn_k", "indexer_k_norm", "indexer_k_norm_bias", "indexer_proj", "ffn_gate", "ffn_up",
    "ffn_down", "ffn_gate_inp", "exp_probs_b", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_shexp", "ffn_up_shexp",
    "ffn_down_shexp",
)  # fmt: skip
INDEX = {name: i for i, name in enumerate(TENSORS)}


class Matrix:
    """A tensor: shape and type as in the file; fields: job.py's int64 of a matrix; at: their address. Vectors are kept in f32."""

    def __init__(self, tensor):
        if tensor.type not in SUPPORTED:
            raise NpglmError(
                f"{tensor.source}: tensor {tensor.name}: the cpu backend has no kernel for type {tensor.type.name}"
            )
        self.name, self.shape, self.type = tensor.name, tensor.shape, tensor.type
        self.data, kind = tensor.data, int(tensor.type)
        if len(tensor.shape) == 1:
            self.data, kind = np.ascontiguousarray(tensor.decode()).reshape(1, -1), int(T.F32)
        self.n_in, self.n_out = tensor.shape[-1], tensor.shape[-2] if len(tensor.shape) > 1 else 1
        chunk_bytes = 256 * BLOCK_BYTES[kind] // BLOCK[kind]
        unpack = unpacker(kind).address if GGML_QUANT_SIZES[T(kind)][0] > 1 else 0
        address, row_bytes = self.data.__array_interface__["data"][0], self.data.nbytes // self.data.shape[0]
        self.fields = np.array([address, kind, row_bytes, chunk_bytes, self.n_in, self.data.shape[0], unpack, 0], np.int64)
        self.at = self.fields.ctypes.data


class Layer(SimpleNamespace):
    """Matrices by attribute. at: the address of their fields, in the order of TENSORS."""

    def __init__(self, **matrices):
        super().__init__(**matrices)
        self.table = np.zeros((len(TENSORS), job.MATRIX_FIELDS), np.int64)
        for name, matrix in matrices.items():
            if matrix is not None and name in INDEX:
                self.table[INDEX[name]] = matrix.fields
        self.at = self.table.ctypes.data


def load(weights: SimpleNamespace) -> SimpleNamespace:
    """Checkpoint.weights -> the same tree of Matrix and Layer."""
    loaded = SimpleNamespace(**{n: Matrix(t) for n, t in vars(weights).items() if n != "layers"})
    loaded.layers = [Layer(**{n: t and Matrix(t) for n, t in vars(w).items()}) for w in weights.layers]
    return loaded
