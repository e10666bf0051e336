"""llama.cpp through llama-cpp-python, to time against: one sequence, prefill and decode."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from npglm.errors import NpglmError


@contextmanager
def opened(path, n_ctx: int, threads: int, chunk: int = 512) -> Iterator["LlamaCpp"]:
    """The model at `path` in llama.cpp, for `with`."""
    try:
        import llama_cpp
    except ImportError:
        raise NpglmError("llama_cpp is not installed: pip install 'npglm[oracle]'") from None
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

    def run(self, tokens: list[int], every_row: bool = False) -> np.ndarray:
        """Logits [1,Y] of the last token, or of all ([T,Y]; then at most `chunk`)."""
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            batch = self.library.llama_batch_init(len(part), 0, 1)
            try:
                batch.n_tokens = len(part)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i] = token, self.length + i
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                    batch.logits[i] = every_row or start + i == len(tokens) - 1
                if status := self.library.llama_decode(self.context, batch):
                    raise NpglmError(f"llama_decode returned {status}")
            finally:
                self.library.llama_batch_free(batch)
            self.length += len(part)
        n_rows = len(tokens) if every_row else 1
        logits = self.library.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (n_rows, self.vocab)).copy()


VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
    ctypes.c_int,
)  # fmt: skip
FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """ggml_type_traits_cpu of ggml-cpu.h."""

    _fields_ = [
        ("from_float", FROM_FLOAT), ("vec_dot", VEC_DOT), ("vec_dot_type", ctypes.c_int), ("n_rows", ctypes.c_int64),
    ]  # fmt: skip


def vec_dot(kind: int):
    """(vec_dot, from_float of the activations' type) of a weight type, as ggml's CPU backend has them."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    library = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)  # what it depends on is loaded with it
    of = library.ggml_get_type_traits_cpu
    of.restype, of.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]
    traits = of(kind).contents
    return traits.vec_dot, of(traits.vec_dot_type).contents.from_float
