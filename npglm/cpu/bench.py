"""Benchmark of the CPU backend against llama.cpp: both in one process, in turns, on one file. scripts/bench.py calls it.

A ratio is npglm / llama.cpp of one round; what is printed is the median of the rounds with its spread. On a machine that others use,
only the ratios mean something, and with several threads hardly they: `clock="cpu"` counts this process's CPU time instead (1 thread).
"""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from gguf import GGMLQuantizationType as T

import npglm.cpu
from npglm.cpu import job, threads
from npglm.cpu.host import address_of
from npglm.cpu.jit import entry, kernel
from npglm.cpu.llamacpp import GgmlProducts, opened
from npglm.cpu.simd import fetch_add_one, load_i32x16, prefetch, splat_i32x16, store_i64, sum_i32x16
from npglm.cpu.weights import Matrix
from npglm.forward import forward
from npglm.generate import Model

READ_BYTES = 1 << 30  # several times any cache
PART_BYTES = 1 << 20
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Row:
    """One line of the table: tok/s of both sides in each round."""

    what: str
    threads: int
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    n_bytes: int = 0  # that our side reads for one token; 0: not bound by reading

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def cells(self, bandwidth: float) -> list[str]:
        """what, threads, llama.cpp, npglm, ratio (lowest-highest), GB/s, share of the read bandwidth (bytes/s)."""
        speed = np.median(self.ours)
        read = [f"{self.n_bytes * speed / 1e9:.1f}", f"{self.n_bytes * speed / bandwidth:.0%}"] if self.n_bytes else ["", ""]
        ratio = f"{np.median(self.ratios):.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"
        return [self.what, str(self.threads), f"{np.median(self.theirs):.2f}", f"{speed:.2f}", ratio, *read]


HEAD = ["", "threads", "llama.cpp tok/s", "npglm tok/s", "ratio (spread)", "GB/s", "of read bandwidth"]


def markdown(rows: list[Row], bandwidth: dict[int, float]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells(bandwidth[row.threads]) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def measure(checkpoint, n_threads: int, prompts, depths, rounds: int, n_decode: int, clock: str, say=print) -> list[Row]:
    """Prefill of each length in `prompts` and decoding behind each of `depths`, llama.cpp and npglm in turns."""
    from npglm.describe import per_token

    now, config = CLOCKS[clock], checkpoint.config
    model = Model(checkpoint, forward, npglm.cpu.op_set("ggml", n_threads))
    ids = np.random.default_rng(0).integers(0, config.vocab, max(*prompts, *depths, 1) + n_decode + 8).tolist()
    cache = model.cache(len(ids))
    rows = []
    with opened(checkpoint.path, len(ids), n_threads) as llama:

        def cut(engine, n):
            llama.cut(n) if engine is llama else setattr(cache, "length", n)

        def run(engine, tokens):
            llama.run(tokens) if engine is llama else model.run(cache, tokens)

        def timed(engine, pieces) -> float:
            """Tokens a second."""
            started = now()
            for piece in pieces:
                run(engine, piece)
            return sum(map(len, pieces)) / (now() - started)

        for depth in depths:
            read = per_token(checkpoint, depth)
            row = Row(f"decode at {depth}", n_threads, n_bytes=read["weights_total"] + read["latent_kv"] + read["indexer_keys"])
            for engine in (llama, model):
                cut(engine, 0)
                run(engine, ids[: depth or 1])
                run(engine, ids[depth : depth + 2])
            for _ in range(rounds):
                for engine, speeds in ((llama, row.theirs), (model, row.ours)):
                    cut(engine, depth or 1)
                    speeds.append(timed(engine, [[token] for token in ids[:n_decode]]))
            rows.append(row)
            say(" | ".join(row.cells(1e99)[:5]))
        for n in prompts:
            row = Row(f"prefill of {n}", n_threads)
            for _ in range(rounds):
                for engine, speeds in ((llama, row.theirs), (model, row.ours)):
                    cut(engine, 0)
                    speeds.append(timed(engine, [ids[:n]]))
            rows.append(row)
            say(" | ".join(row.cells(1e99)[:5]))
    return rows


# --- single products --------------------------------------------------------------------------------------------------------

# name, type, columns, rows, tokens, matrices: those of one token together outgrow any cache.
KERNELS = (
    ("attn_output", T.Q8_0, 16384, 6144, 1, 10),
    ("attn_q_b", T.Q8_0, 2048, 16384, 1, 30),
    ("expert gate", T.Q2_K, 6144, 2048, 1, 256),
    ("expert down", T.Q2_K, 2048, 6144, 1, 256),
    *(
        ("expert gate", kind, 6144, 2048, 1, 128)
        for kind in (
            T.Q3_K,
            T.Q4_K,
            T.Q5_K,
            T.Q6_K,
            T.IQ1_M,
            T.IQ2_XXS,
            T.IQ2_XS,
            T.IQ2_S,
            T.IQ3_XXS,
            T.IQ3_S,
            T.IQ4_XS,
            T.IQ4_NL,
        )
    ),
    *(("expert gate", kind, 6144, 2048, n, 2) for kind in (T.Q8_0, T.Q2_K) for n in (16, 64, 512)),
)
KERNEL_HEAD = ["product", "type", "threads", "ggml", "npglm", "ratio (spread)", "of read bandwidth", "relative difference"]


def measure_kernels(blocks, n_threads: int, rounds: int, bandwidth: float, clock: str, say=print) -> list[list[str]]:
    """Rows of KERNEL_HEAD: each product of KERNELS in ggml and here, in turns, on the same bytes.

    blocks(type, n_rows, n_cols) gives encoded rows, uint8. GB/s of weights for one token, else billions of multiplications a second.
    """
    ops, now, table = npglm.cpu.op_set("ggml", n_threads), CLOCKS[clock], []
    say("\n".join("| " + " | ".join(cells) + " |" for cells in (KERNEL_HEAD, ["---"] * len(KERNEL_HEAD))))
    for name, kind, n_in, n_out, n_tokens, count in KERNELS:
        with GgmlProducts(int(kind), count, n_in, n_out, n_tokens) as ggml:
            data = blocks(kind, n_out, n_in)
            for w in ggml.weights:
                w[...] = data
            ggml.x[...] = np.random.default_rng(0).standard_normal(ggml.x.shape, np.float32)
            x = np.array(ggml.x)
            matrices = [
                Matrix(SimpleNamespace(name=name, source="", shape=(n_out, n_in), type=kind, data=w)) for w in ggml.weights
            ]

            def ours(x=x, matrices=matrices):
                for w in matrices:
                    y = ops.linear(x, w)
                return y

            seconds = []
            for _ in range(rounds + 1):  # the first warms up
                for run in (lambda ggml=ggml: ggml.run(n_threads), ours):
                    started = now()
                    y = run()
                    seconds.append(now() - started)
            work = data.nbytes * count if n_tokens == 1 else n_in * n_out * n_tokens * count
            theirs, mine = np.array(seconds[2:]).reshape(-1, 2).T
            ratios, speed = theirs / mine, work / np.median(mine) / 1e9
            away = float(np.linalg.norm(y - ggml.y[-1]) / np.linalg.norm(ggml.y[-1]))
            unit = "GB/s" if n_tokens == 1 else "GMAC/s"
            table.append([
                f"{name} {n_in} to {n_out}, {n_tokens} token{'s' * (n_tokens > 1)}", kind.name, str(n_threads),
                f"{work / np.median(theirs) / 1e9:.1f} {unit}", f"{speed:.1f} {unit}",
                f"{np.median(ratios):.2f} ({ratios.min():.2f}-{ratios.max():.2f})",
                f"{speed * 1e9 / bandwidth:.0%}" if n_tokens == 1 else "", f"{away:.0e}",
            ])  # fmt: skip
            say("| " + " | ".join(table[-1]) + " |")
    return table


# --- what the machine reads -------------------------------------------------------------------------------------------------


@kernel
def _read(shared, thread):
    """shared: counter, address, parts, where to put a sum."""
    while True:
        part = fetch_add_one(shared)
        if part >= job.get(shared, 2):
            return
        at, total = job.get(shared, 1) + part * PART_BYTES, splat_i32x16(0)
        for i in range(0, PART_BYTES, 64):
            prefetch(at + i + 4096)
            total = total + load_i32x16(at + i)
        store_i64(shared + 64 + 64 * thread, sum_i32x16(total))  # so that LLVM does not leave the loop out


@entry
def _read_all(function, shared, n_threads):
    store_i64(shared, 0)
    threads.on_all_threads(function, shared, n_threads)


def read_bandwidth(n_threads: int, clock: str = "wall", data: np.ndarray | None = None) -> float:
    """Bytes a second, the best of five. data: uint8 to read, in whole MiB (default: READ_BYTES)."""
    n_threads = threads.start(n_threads)
    data = np.ones(READ_BYTES, np.uint8) if data is None else data
    shared = np.zeros(8 + 8 * n_threads, np.int64)
    shared[1:3] = address_of(data), data.size // PART_BYTES
    seconds = []
    for _ in range(6):
        started = CLOCKS[clock]()
        _read_all(_read.address, shared.ctypes.data, n_threads)
        seconds.append(CLOCKS[clock]() - started)
    return data.size // PART_BYTES * PART_BYTES / min(seconds[1:])
