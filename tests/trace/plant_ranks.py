"""Two tensor-parallel ranks, simulated from the reference's steps, right or with one rank broken. Shares no code with npglm.trace.faults."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from npglm.trace.graph import Model, run
from reference.numerics import Numerics

COLUMNS = ("q", "q_pe", "q_nope_absorbed", "kqv", "kqv_out", "ffn_gate", "ffn_up", "ffn_swiglu")
SUMS = {"attn_out": "attn_output", "ffn_shexp": "ffn_down_shexp", "ffn_out": "ffn_down"}  # probe -> weight cut along its input


@dataclass(frozen=True)
class RankPlant:
    """op, layer, rank: what is broken. columns(name, parts) and share(name, rank, x, weight, slice) change what a rank makes."""

    name: str
    op: str
    layer: int
    rank: int
    families: tuple[str, ...]
    columns: Callable | None = None
    share: Callable | None = None
    types: str = ""


def run_ranks(model: Model, numerics: Numerics, broken: RankPlant | None = None, reduced: bool = False) -> list[dict]:
    """Each rank's arrays. reduced: sums are recorded after the all-reduce, else each rank's own share."""
    values: dict[str, np.ndarray] = {}
    ranks: list[dict] = [{}, {}]
    for step in model.steps():
        place = model.place(step.layer, numerics)
        made = run(step, place, [values[n] for n in step.inputs])[0]
        parts = [made, made]
        dense_sum = step.probe in SUMS and hasattr(place.w, SUMS[step.probe])
        if step.probe in COLUMNS:
            half = made.shape[1] // 2
            parts = [made[:, :half], made[:, half:]]
            if broken and broken.columns:
                parts = broken.columns(step.name, parts)
            made = np.concatenate(parts, 1)
        elif dense_sum:
            weight, source = getattr(place.w, SUMS[step.probe]), step.inputs[0]
            n = weight.shape[-1] // 2
            parts = []
            for rank in range(2):
                cut = slice(rank * n, (rank + 1) * n)
                share = ranks[rank][source].astype(numerics.acc) @ weight.decode()[:, cut].T
                if broken and broken.share:
                    share = broken.share(step.name, rank, ranks[rank][source], weight, cut, share)
                parts.append(np.asarray(share, np.float32))
            made = parts[0] + parts[1]
            if reduced:
                parts = [made, made]
        values[step.name] = made
        for rank in range(2):
            part = parts[rank]
            ranks[rank][step.name] = np.ascontiguousarray(part, np.int32 if part.dtype.kind == "i" else np.float32)
    return ranks


def same_shard(*names):
    return lambda name, parts: [parts[0], parts[0].copy()] if name in names else parts


def bytes_cut(name_wanted):
    """The weight's rows cut at half of their bytes, inside a block."""

    def share(name, rank, x, weight, cut, right):
        if name != name_wanted or rank == 0:
            return right
        while hasattr(weight, "tensor"):
            weight = weight.tensor
        block, block_bytes = GGML_QUANT_SIZES[weight.type]
        row = weight.data.shape[1]
        n = -(-(cut.stop - cut.start) // block)
        data = weight.data[:, row // 2 :][:, : n * block_bytes]
        data = np.pad(data, ((0, 0), (0, n * block_bytes - data.shape[1])))
        with np.errstate(all="ignore"):
            w = dequantize(np.ascontiguousarray(data), weight.type)[:, : cut.stop - cut.start]
            return x.astype(np.float64) @ w.T.astype(np.float64)

    return share


RANK_PLANTS = [
    RankPlant("rank 1 holds rank 0's gate/up", "ffn_gate", 0, 1, ("wrong shard",), same_shard("ffn_gate-0", "ffn_up-0")),
    RankPlant("rank 1 holds rank 0's query heads", "q", 1, 1, ("wrong shard",), same_shard("q-1")),
    RankPlant(
        "rank 1's share counted twice",
        "attn_out",
        1,
        1,
        ("constant factor", "parts of the sum"),
        share=lambda name, rank, x, w, cut, right: right * 2 if name == "attn_out-1" and rank else right,
    ),
    RankPlant(
        "rank 1 reads rank 0's columns of the down projection",
        "ffn_out",
        0,
        1,
        ("wrong shard",),
        share=lambda name, rank, x, w, cut, right: x @ w.decode()[:, : len(x[0])].T if name == "ffn_out-0" and rank else right,
    ),
    RankPlant(
        "down projection cut inside a block",
        "ffn_out",
        0,
        1,
        ("split inside a block",),
        share=bytes_cut("ffn_out-0"),
        types="Q2_K",
    ),
]
