"""Benchmark of the CPU backend against llama.cpp: both in one process, in turns, on one file. scripts/bench.py calls it.

A ratio is npglm / llama.cpp of one round; what is printed is the median of the rounds with its spread. On a machine that others use,
only the ratios mean something, and with several threads hardly they: `clock="cpu"` counts this process's CPU time instead (1 thread).
"""

import time
from dataclasses import dataclass, field

import numpy as np

import npglm.cpu
from npglm.cpu import job, threads
from npglm.cpu.host import address_of
from npglm.cpu.jit import entry, kernel
from npglm.cpu.llamacpp import opened
from npglm.cpu.simd import fetch_add_one, load_i32x16, prefetch, splat_i32x16, store_i64, sum_i32x16
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


def read_bandwidth(n_threads: int, clock: str = "wall") -> float:
    """Bytes a second, the best of five."""
    n_threads = threads.start(n_threads)
    data = np.ones(READ_BYTES, np.uint8)
    shared = np.zeros(8 + 8 * n_threads, np.int64)
    shared[1:3] = address_of(data), READ_BYTES // PART_BYTES
    seconds = []
    for _ in range(6):
        started = CLOCKS[clock]()
        _read_all(_read.address, shared.ctypes.data, n_threads)
        seconds.append(CLOCKS[clock]() - started)
    return READ_BYTES / min(seconds[1:])
