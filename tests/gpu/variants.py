"""The variants that are compiled for GPUs: those that GLM-5.2's shape asks for, and every weight type."""

from types import SimpleNamespace

from npglm.gpu.attention import FEW_SHAPES, MANY_SHAPES, MERGE
from npglm.gpu.matmul import WHOLE_BLOCKS, matmul_variant, matvec_grid
from npglm.gpu.moe import DOWN, GATE
from npglm.gpu.weights import type_defines
from raw_kernels import DECODED_TYPES, FAST_TYPES, KERNELS, TYPES

ROUNDING = {"ROWS": 2, "BLOCK": 256}
# family, types, columns, rows, and what its callers ask for: see npglm/gpu/{matmul,attention,moe}.py
MATVECS = (
    ("matvec", FAST_TYPES, 6144, 154880, {}),
    ("matvec", FAST_TYPES, 2048, 6144, {}),
    ("matvec", FAST_TYPES, 16384, 6144, {}),
    ("matvec", FAST_TYPES, 512, 256, WHOLE_BLOCKS),
    ("matvec_rounding", ("q8_0",), 192, 512, ROUNDING),
    ("matvec_rounding", ("q8_0",), 2048, 6144, ROUNDING),
    ("matvec_merge", ("q8_0",), 512, 256, MERGE),
    ("matvec_projections", FAST_TYPES, 6144, 2048, {"ROWS": 2}),
    ("matvec_projections", FAST_TYPES, 6144, 2048, {"TOKENS": 8}),
    ("matvec_rope", FAST_TYPES, 2048, 16384, {"ROWS": 2, "GROUP": 8, "BLOCK": 256}),
    ("matvec_rope", FAST_TYPES, 2048, 8192, {"ROWS": 2, "GROUP": 8, "BLOCK": 256, "RING": 32}),
    ("matvec_rope", FAST_TYPES, 2048, 4096, {"ROWS": 2}),
    *(("matvec_ffn", (kind,), 6144, 2048, GATE[kind]) for kind in FAST_TYPES),
    *(("matvec_ffn", (kind,), 2048, 6144, DOWN[kind] | {"CHOSEN": 8}) for kind in FAST_TYPES),
)
MLA = {"RANK": 512, "ROPE": 64}


def variants(types=DECODED_TYPES, max_shared=227 << 10):
    """(family, defines) pairs, every family among them."""
    for family in ("elementwise", "activations", "matvec_f32", "moe", "sample", "norm_blocks", "exchange", "host"):
        yield family, {}
    for threads in (512, 1024):
        yield "topk", {"THREADS": threads}
    for kind in types:
        yield "embed", type_defines(kind)
        yield "matmul_decoded", type_defines(kind)
    for family, kinds, n_in, n_out, asked in MATVECS:
        for kind in kinds:
            for tokens in (1, 2, 4, 8) if n_in == 6144 and family == "matvec" else (1,):
                weight = SimpleNamespace(type=kind, n_in=n_in, n_out=n_out)
                yield family, matvec_grid(weight, **{"TOKENS": tokens} | asked)[1]
    for kind in FAST_TYPES:
        for n_in in (6144, 2048, 16384, 512) + ((192,) if kind == "q8_0" else ()):
            for tokens in (32, 64, 128) if kind == "q8_0" else (32, 64):
                yield "matmul", matmul_variant(kind, n_in, tokens, max_shared)
        yield "fetch", type_defines(kind)
    yield "indexer", {"DIM": 128}
    yield "indexer_f16", {"DIM": 128, "HEADS": 32}
    yield "attention", MLA
    for heads, group, keys in MANY_SHAPES + FEW_SHAPES:
        yield "attention_f16", MLA | {"HEADS": heads, "GROUP": group, "KEYS": keys}


def kernels_of(family: str, defines: dict) -> list[str]:
    kind = defines.get("TYPE", "")
    return [k.name for k in KERNELS.values() if k.family == family and (family not in TYPES or k.name.endswith(f"_{kind}"))]


# Kernels of the decode graph (TOKENS 1), and those above 2 % of a prefill: they must keep everything in registers.
NO_SPILL = frozenset(
    k.name
    for k in KERNELS.values()
    if k.family
    in (
        "elementwise",
        "activations",
        "norm_blocks",
        "matvec",
        "matvec_rounding",
        "matvec_merge",
        "matvec_projections",
        "matvec_rope",
        "matvec_ffn",
        "matvec_f32",
        "moe",
        "indexer",
        "indexer_f16",
        "topk",
        "sample",
        "matmul",
        "exchange",
        "fetch",
        "host",
    )
    or k.name in ("attention_f16", "attention_merge_f32", "embed_q8_0")
)
