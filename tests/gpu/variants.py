"""The variants that are compiled for GPUs: those that GLM-5.2's shape asks for, and every weight type."""

from npglm.gpu.matmul import matmul_variant
from npglm.gpu.weights import type_defines
from raw_kernels import DECODED_TYPES, FAST_TYPES, KERNELS, TYPES

# N_IN, GROUP, ROWS: q_a, kv_a, experts and head, q_b, experts' down, attn_output, v_b, k_b
MATVECS = (
    (6144, 128, 2),
    (6144, 128, 1),
    (6144, 32, 1),
    (2048, 32, 1),
    (2048, 32, 2),
    (16384, 32, 1),
    (512, 8, 1),
    (192, 4, 1),
)
MLA = {"RANK": 512, "ROPE": 64}
# HEADS, GROUP, KEYS of attention_f16: prefill, decode, 64 KiB of shared memory
SHAPES = ((32, 4, 64), (16, 8, 64), (16, 4, 16))


def variants(types=DECODED_TYPES, max_shared=227 << 10):
    """(family, defines) pairs, every family among them."""
    for family in ("elementwise", "activations", "matvec_f32", "moe", "topk", "sample"):
        yield family, {}
    yield "norm_blocks", {"CHUNKS": 1}
    for kind in types:
        yield "embed", type_defines(kind)
        yield "matmul_decoded", type_defines(kind)
    for kind in FAST_TYPES:
        for n_in, group, rows in MATVECS:
            if kind == "q8_0" or n_in % 256 == 0:
                chosen = 8 if n_in == 2048 else 1  # the experts' down matrices
                yield "matvec", {"TYPE": kind, "N_IN": n_in, "GROUP": group, "ROWS": rows, "TOKENS": 1, "CHOSEN": chosen}
        for tokens in (2, 4, 8):
            yield "matvec", {"TYPE": kind, "N_IN": 6144, "GROUP": 32, "ROWS": 1, "TOKENS": tokens, "CHOSEN": 1}
        for n_in in (6144, 2048, 16384, 512) + ((192,) if kind == "q8_0" else ()):
            yield "matmul", matmul_variant(kind, n_in, max_shared)
    yield "indexer", {"DIM": 128}
    yield "indexer_f16", {"DIM": 128, "HEADS": 32}
    yield "attention", MLA
    for heads, group, keys in SHAPES:
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
        "matvec_f32",
        "moe",
        "indexer",
        "indexer_f16",
        "topk",
        "sample",
        "matmul",
    )
    or k.name in ("attention_f16", "attention_merge_f32", "embed_q8_0")
)
