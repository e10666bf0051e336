"""Live llama.cpp through llama-cpp-python: every node of one prefill, as its eval callback sees it. Needs the extra `npglm[oracle]`."""

import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from npglm.checkpoint import Checkpoint
from npglm.errors import NpglmError
from npglm.progress import LayerProgress
from npglm.trace.formats.llamacpp import Node, map_graph
from npglm.trace.record import describe_run, write_trace

DTYPES = {0: np.float32, 1: np.float16, 24: np.int8, 25: np.int16, 26: np.int32, 27: np.int64, 28: np.float64}
BF16 = 30


def need_llama_cpp():
    """The package, or an NpglmError that names the extra."""
    try:
        import llama_cpp
    except ImportError:
        raise NpglmError("llama_cpp is not installed: pip install 'npglm[oracle]'") from None
    return llama_cpp


class _TensorHead(ctypes.Structure):
    """How ggml_tensor begins (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_abort(message: bytes) -> None:
    """ggml ends the process after a failed assertion; this makes it one line and status 2 instead of a backtrace."""
    print(f"error: llama.cpp gave up: {message.decode(errors='replace').strip()}", file=sys.stderr, flush=True)
    os._exit(2)


class _Ggml:
    """The few functions of libggml-base that llama_cpp does not bind."""

    def __init__(self, llama_cpp):
        library = llama_cpp.llama_cpp._lib  # libllama's handle finds what its dependencies export; a second copy would not do
        self.name = self._bind(library.ggml_get_name, ctypes.c_char_p, ctypes.c_void_p)
        self.op = self._bind(library.ggml_op_desc, ctypes.c_char_p, ctypes.c_void_p)
        self.n_bytes = self._bind(library.ggml_nbytes, ctypes.c_size_t, ctypes.c_void_p)
        self.get = self._bind(
            library.ggml_backend_tensor_get, None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        )
        self.version = self._bind(library.ggml_version, ctypes.c_char_p)().decode()
        self._bind(library.ggml_set_abort_callback, ctypes.c_void_p, ctypes.c_void_p)(_on_abort)

    @staticmethod
    def _bind(function, result, *arguments):
        function.restype, function.argtypes = result, arguments
        return function

    def array(self, tensor: int) -> np.ndarray:
        """The tensor's values, C-contiguous, in four row-major sizes; bf16 as f32."""
        head = _TensorHead.from_address(tensor)
        dtype = np.uint16 if head.type == BF16 else DTYPES.get(head.type)
        if dtype is None:
            raise NpglmError(f"node {self.name(tensor).decode()}: ggml type {head.type} cannot be recorded")
        span = (ctypes.c_char * self.n_bytes(tensor))()
        self.get(tensor, span, 0, len(span))
        values = np.ndarray(tuple(head.ne)[::-1], dtype, span, strides=tuple(head.nb)[::-1])
        if head.type == BF16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(values)


def record_nodes(
    checkpoint: Checkpoint,
    tokens: list[int],
    threads: int = 1,
    flash_attn: bool = True,
    keep: Callable[[np.ndarray], object] = lambda array: array,
    on_layer: Callable[[int], object] = lambda index: None,
) -> list[Node]:
    """Run llama.cpp on `tokens` from an empty f16 cache, logits for all of them, and return every node of its graph.

    keep: what to store as Node.value for an array, which is the node's own copy. on_layer: called as a layer begins. Raises NpglmError
    with llama.cpp's last words.
    """
    llama_cpp = need_llama_cpp()
    checkpoint.config.check_tokens(tokens)
    n = len(tokens)
    ggml, nodes, failed, interrupts = _Ggml(llama_cpp), [], [], []

    def on_node(tensor, ask, _):
        if interrupts:
            return False
        try:
            if not ask:
                array = ggml.array(tensor)
                op, label = ggml.op(tensor).decode(), ggml.name(tensor).decode()
                nodes.append(Node(len(nodes), op, label, array.shape, keep(array)))
                if nodes[-1].base == "attn_norm":
                    on_layer(int(label.rpartition("-")[2]))
            return True
        except BaseException as error:  # noqa: BLE001 - ctypes would swallow it, Ctrl-C included
            failed.append(error)
            return False

    callback = llama_cpp.ggml_backend_sched_eval_callback(on_node)
    with _context(llama_cpp, checkpoint.path, n, threads, flash_attn, callback) as (context, say):
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            with _holding_interrupts(interrupts):
                status = llama_cpp.llama_decode(context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if failed:
            raise failed[0]
        if interrupts:
            raise KeyboardInterrupt
        if status or not any(node.label == "result_output" for node in nodes):
            raise NpglmError(f"llama.cpp: decoding ended early, with status {status}{say()}")
    return nodes


@contextmanager
def _holding_interrupts(seen: list) -> Iterator[None]:
    """Ctrl-C goes into `seen`: raised inside a callback it would be lost, as ctypes swallows what escapes one."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set, and only there do they run
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _context(llama_cpp, path: Path, n_tokens: int, threads: int, flash_attn: bool, callback) -> Iterator[tuple]:
    """(llama_context, function that gives llama.cpp's last words)"""
    words: list[str] = []

    @llama_cpp.llama_log_callback
    def listen(level, text, _):
        if level in (3, 4):  # warning, error
            words.append(text.decode(errors="replace").strip())

    def say() -> str:
        return f": {words[-1]}" if words else ""

    llama_cpp.llama_log_set(listen, None)
    model = context = None
    try:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False  # repacked (AMX, 8x8) weights: other sums, and no 3D ones such as attn_k_b
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if not model:
            raise NpglmError(f"{path.name}: llama.cpp does not load it{say()}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attn)  # 0 disabled, 1 enabled; by itself it would try and may do without
        params.offload_kqv = params.op_offload = False
        params.cb_eval = callback
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise NpglmError(f"{path.name}: llama.cpp makes no context for it{say()}")
        yield context, say
    finally:
        if context:
            llama_cpp.llama_free(context)
        if model:
            llama_cpp.llama_model_free(model)
        from llama_cpp._logger import llama_log_callback  # the package's own again; `listen` goes away here

        llama_cpp.llama_log_set(llama_log_callback, None)


def engine_version() -> str:
    llama_cpp = need_llama_cpp()
    return f"llama-cpp-python {llama_cpp.__version__}, ggml {_Ggml(llama_cpp).version}"


class _Spool:
    """Arrays on disk until the trace is written, so that memory holds one at a time."""

    def __init__(self, file):
        self.file, self.at = file, 0

    def keep(self, array: np.ndarray) -> tuple[int, np.dtype, tuple[int, ...]]:
        place = (self.at, array.dtype, array.shape)
        self.file.write(np.ascontiguousarray(array).data)
        self.at += array.nbytes
        return place

    def array(self, place: tuple) -> np.ndarray:
        self.file.flush()
        at, dtype, shape = place
        return np.memmap(self.file, dtype, "r", at, shape) if np.prod(shape) else np.empty(shape, dtype)


@contextmanager
def _temporary(out) -> Iterator:
    """A file without a name in the folder of `out`. A full disk may show as late as when it is closed."""
    try:
        with tempfile.TemporaryFile(dir=Path(out).absolute().parent) as file:
            yield file
    except OSError as error:
        raise NpglmError(f"{out}: cannot be written: {error.strerror}") from None


def record_trace(checkpoint: Checkpoint, tokens: list[int], out, threads: int = 1, flash_attn: bool = True) -> tuple[int, int]:
    """Record one prefill into a trace at `out`; returns (probes, other nodes) written.

    Our probes go under our names. Every other node, and those of which a probe keeps a part only, is `ggml|ORDER|OP|LABEL`, in full.
    """
    metadata = describe_run(checkpoint, tokens, "ggml") | {"engine": "llama.cpp", "engine_version": engine_version()}
    with _temporary(out) as file, LayerProgress(checkpoint.config.n_layers, label="llama.cpp") as progress:
        spool = _Spool(file)
        nodes = record_nodes(checkpoint, tokens, threads, flash_attn, spool.keep, progress.over().layer)
        places, done = {}, set()
        mapped = map_graph(nodes, n_tokens=len(tokens))
        for m in mapped:
            places[m.name] = spool.keep(m.take(spool.array(m.node.value))[0])
            if m.whole:
                done.add(m.node.order)
        for node in nodes:
            if node.order not in done:
                places[f"ggml|{node.order:05}|{node.op}|{node.label}"] = node.value
        write_trace(out, {name: spool.array(place) for name, place in places.items()}, metadata, checkpoint.paths)
    return len(mapped), len(places) - len(mapped)
