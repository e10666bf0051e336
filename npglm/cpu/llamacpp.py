"""llama.cpp through llama-cpp-python, to time against: one sequence, prefill and decode."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.llamacpp import need_llama_cpp


@contextmanager
def opened(path, n_ctx: int, threads: int, chunk: int = 512) -> Iterator["LlamaCpp"]:
    """The model at `path` in llama.cpp, for `with`."""
    llama_cpp = need_llama_cpp()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False  # repacked weights have no product for attn_k_b: with them it stops
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, chunk, chunk
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.offload_kqv = params.op_offload = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    context = model and llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise NpglmError(f"{path}: llama.cpp cannot load it")
    try:
        yield LlamaCpp(llama_cpp, model, context, chunk)
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


class LlamaCpp:
    """length: tokens in its cache."""

    def __init__(self, library, model, context, chunk: int):
        self.library, self.context, self.chunk, self.length = library, context, chunk, 0
        self.vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the cache."""
        self.library.llama_memory_seq_rm(self.library.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def run(self, tokens: list[int]) -> np.ndarray:
        """Logits [1,Y] of the last token."""
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            batch = self.library.llama_batch_init(len(part), 0, 1)
            try:
                batch.n_tokens = len(part)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i] = token, self.length + i
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                    batch.logits[i] = start + i == len(tokens) - 1
                if status := self.library.llama_decode(self.context, batch):
                    raise NpglmError(f"llama_decode returned {status}")
            finally:
                self.library.llama_batch_free(batch)
            self.length += len(part)
        logits = self.library.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (1, self.vocab)).copy()


class _InitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class GgmlProducts:
    """A ggml graph of `count` products, each of its own matrix of a type with one x. Use as a context manager.

    In ggml's memory: weights uint8 [count, n_out, row_bytes], x f32 [T, n_in], y f32 [count, T, n_out], which run() writes.
    """

    def __init__(self, kind: int, count: int, n_in: int, n_out: int, n_tokens: int):
        llama_cpp = need_llama_cpp()
        llama_cpp.llama_backend_init()
        self.library = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)  # what it depends on is loaded with it
        row_bytes = self._call("ggml_row_size", ctypes.c_size_t, ctypes.c_int(kind), ctypes.c_int64(n_in))
        sizes = count * n_out * row_bytes, 4 * n_tokens * n_in, 4 * count * n_tokens * n_out
        room = (64 << 20) + 64 * 4 * n_tokens * n_in  # run() takes its scratch from there, each time anew
        self.context = self._call("ggml_init", ctypes.c_void_p, _InitParams(sum(sizes) + room, None, False))
        if not self.context:
            raise NpglmError(f"ggml found no {sum(sizes) + room} bytes")
        self.graph = self._pointer("ggml_new_graph_custom", ctypes.c_size_t(2 * count + 64), ctypes.c_bool(False))
        x = self._tensor(0, n_in, n_tokens)
        matrices = [self._tensor(kind, n_in, n_out) for _ in range(count)]
        products = [self._pointer("ggml_mul_mat", ctypes.c_void_p(w), ctypes.c_void_p(x)) for w in matrices]
        for product in products:
            self._call("ggml_build_forward_expand", None, ctypes.c_void_p(self.graph), ctypes.c_void_p(product))
        self.x = self._array(x, np.float32, (n_tokens, n_in))
        self.weights = [self._array(w, np.uint8, (n_out, row_bytes)) for w in matrices]
        self.y = [self._array(y, np.float32, (n_tokens, n_out)) for y in products]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self._call("ggml_free", None, ctypes.c_void_p(self.context))

    def run(self, n_threads: int) -> None:
        arguments = (ctypes.c_void_p(self.context), ctypes.c_void_p(self.graph), ctypes.c_int(n_threads))
        if status := self._call("ggml_graph_compute_with_ctx", ctypes.c_int, *arguments):
            raise NpglmError(f"ggml_graph_compute_with_ctx returned {status}")

    def _tensor(self, kind: int, ne0: int, ne1: int):
        return self._pointer("ggml_new_tensor_2d", ctypes.c_int(kind), ctypes.c_int64(ne0), ctypes.c_int64(ne1))

    def _pointer(self, name: str, *arguments):
        return self._call(name, ctypes.c_void_p, ctypes.c_void_p(self.context), *arguments)

    def _call(self, name: str, result, *arguments):
        function = getattr(self.library, name)
        function.restype, function.argtypes = result, [type(a) for a in arguments]
        return function(*arguments)

    def _array(self, tensor, dtype, shape) -> np.ndarray:
        address = self._call("ggml_get_data", ctypes.c_void_p, ctypes.c_void_p(tensor))
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype).reshape(shape)
