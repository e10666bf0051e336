"""GPU kernels as HIP source strings, and the typed argument list of each.

To add a kernel: write it in a family's `.hip` file (extern "C" through KERNEL(), no templates, no #include, variants by -D) and
add its line to TABLE; a new family also to FAMILIES and tests/gpu/variants.py. npglm/gpu/device.py compiles and launches it. A new
verb stands in npglm/gpu/<family>.py, npglm/cpu/ops.py and reference/ops/<family>.py and in the VERBS of all three; its cases, which
take a `place`, in tests/ops (`pytest tests/ops -k NAME`; on a GPU too, where there is one).

A family is compiled as preamble.hip + the files that it needs + its own, one module per set of -D options. Every platform
difference is in preamble.hip. Block sizes are multiples of 64; kernels run with 32 and with 64 lanes.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

# Families, and the files that stand between the preamble and them.
FAMILIES = {
    "embed": ("quant",),
    "activations": ("blocks",),
    "norm_blocks": ("blocks", "inbox", "cache_rows"),
    "elementwise": ("cache_rows",),
    "matvec": ("blocks", "dots", "inbox"),
    "matvec_rounding": ("blocks", "dots"),
    "matvec_projections": ("dots",),
    "matvec_rope": ("blocks", "cache_rows", "dots"),
    "matvec_ffn": ("order", "router", "dots", "inbox"),
    "matvec_f32": (),
    "matmul": ("rows",),
    "matmul_decoded": ("quant", "rows"),
    "moe": ("order", "router"),
    "fetch": (),
    "host": (),
    "indexer": (),
    "indexer_f16": (),
    "topk": ("order",),
    "attention": ("blocks", "merge"),
    "matvec_merge": ("blocks", "dots", "merge"),
    "attention_f16": (),
    "sample": ("order",),
    "exchange": ("inbox",),
}

# family: kernel(argument, ...). An argument is `name dtype[axes]` for an array, `name dtype` for a number. `=`: written;
# `?`: may be None; `~`: rows may be strided. Axis letters are npglm/config.py's; n is a row, W/D bytes and scales of weights.
# Weights: npglm/gpu/weights.py. <t> stands for each name of TYPES[family], the -DTYPE of the variant.
TABLE = """
embed: embed_<t>(table u8[Y,row_bytes], grid ?s8[entries], tokens ?i32[T], y =f32[T,n], n_rows i32, n i32)
activations: quantize_q8_0(x f32[T,n]~, q =s8[T,n], d =f16[T,n/32], n_rows i32, n i32, x_stride i64)
activations: round_q8_0_f32(x f32[T,n]~, y =f32[T,n], n_rows i32, n i32, x_stride i64)
activations: quantize_q8_k(x f32[T,n]~, q =s8[T,n], d =f32[T,n/256], sums =i16[T,n/16], n_rows i32, n i32, x_stride i64)
activations: round_q8_k_f32(x f32[T,n]~, y =f32[T,n], n_rows i32, n i32, x_stride i64)
activations: round_bf16_f32(x f32[T,n]~, y =f32[T,n], n_rows i32, n i32, x_stride i64)
activations: round_f16_f32(x f32[T,n]~, y =f32[T,n], n_rows i32, n i32, x_stride i64)
norm_blocks: rms_norm_blocks_f32(x f32[T,n], plus ?f32[T,n], total ?=f32[T,n], weight f32[n], y =f32[T,n], q =s8[T,n], \
d =f16[T,n/32], q_k =s8[T,n], d_k =f32[T,n/256], sums =i16[T,n/16], n i32, eps f32, parts i32, settled i32)
norm_blocks: sum_rms_norm_blocks_f32(x f32[1,n], total =f32[1,n], weight f32[n], y =f32[1,n], q =s8[1,n], \
d =f16[1,n/32], q_k =s8[1,n], d_k =f32[1,n/256], sums =i16[1,n/16], inboxes u64[world], calls =i32[blocks], n i32, eps f32, parts i32, \
capacity i32, rank i32, world i32, settled i32)
norm_blocks: latent_norms_f32(x f32[T,n], weight f32[n], y =f32[T,n], q =s8[T,n], d =f16[T,n/32], q_k =s8[T,n], d_k =f32[T,n/256], \
sums =i16[T,n/16], n i32, kv f32[T,R+P], kv_weight f32[R], cosine f32[T,P/2], sine f32[T,P/2], latent =f32[T,R+P], pos ?i32[T], \
cache ?=f16[capacity,R+P], rank i32, n_pairs i32, eps f32, parts i32)
elementwise: add_f32(x f32[n], y f32[n], out =f32[n], n i64)
elementwise: scale_f32(x f32[n], out =f32[n], n i64, factor f32)
elementwise: sigmoid_f32(x f32[n], out =f32[n], n i64)
elementwise: swiglu_f32(gate f32[n], up f32[n], out =f32[n], n i64)
elementwise: zero_i32(x =i32[n], n i64)
elementwise: rms_norm_f32(x f32[T,n]~, weight f32[n], y =f32[T,n]~, n i32, x_stride i64, y_stride i64, eps f32)
elementwise: layer_norm_f32(x f32[T,n]~, weight f32[n], bias f32[n], y =f32[T,n]~, n i32, x_stride i64, y_stride i64, eps f32)
elementwise: rope_table_f32(pos i32[T], frequency f64[P/2], cosine =f32[T,P/2], sine =f32[T,P/2], n_tokens i32, n i32)
elementwise: rope_f32(x f32[T,heads,P]~, cosine f32[T,P/2], sine f32[T,P/2], y =f32[T,heads,P]~, n_rows i32, heads i32, n i32, \
x_stride i64, y_stride i64)
elementwise: index_key_f16(x f32[T,J], weight f32[J], bias f32[J], cosine f32[T,P/2], sine f32[T,P/2], pos i32[T], \
cache =f16[capacity,J], n i32, n_pairs i32, eps f32)
elementwise: store_f32(rows f32[T,n], pos i32[T], cache =f32[capacity,n], n_tokens i32, n i32)
elementwise: store_f16(rows f32[T,n], pos i32[T], cache =f16[capacity,n], n_tokens i32, n i32)
matvec: matvec_<t>(w u8[W], scales ?u8[W/4], d f16[D], x s8[T,n_in], x_d any[T,blocks], sums ?i16[T,n_in/16], experts ?i32[pairs], \
y =f32[pairs,n_out]~, q ?=s8[pairs,n_out], y_d ?=f16[pairs,n_out/32], n_pairs i32, n_out i32, n_matrices i32, x_div i32, y_stride i64, \
inboxes ?u64[world], calls ?i32[blocks], capacity i32, rank i32, world i32)
matvec_rounding: matvec_rounding_<t>(w u8[W], d f16[D], x f32[pairs,n_in]~, y =f32[pairs,n_out]~, n_out i32, n_matrices i32, \
x_stride i64, y_stride i64, beside ?f32[m], beside_q ?=s8[m], beside_d ?=f32[m/256], beside_sums ?=i16[m/16], n_beside i32, \
beside_n i32)
matvec_merge: matvec_merge_<t>(w u8[W], d f16[D], part f32[T,splits,H,n_in], part_ml f32[T,splits,H,2], y =f32[T,H,n_out], \
q =s8[T,H,n_out], y_d =f16[T,H,n_out/32], n_out i32, heads i32, splits i32)
matvec_projections: matvec_projections_<t>(x s8[T,n_in], x_d any[T,blocks], sums ?i16[T,n_in/16], \
w0 u8[W], scales0 ?u8[W/4], d0 f16[D], y0 =f32[T,n0], n0 i32, w1 u8[W], scales1 ?u8[W/4], d1 f16[D], y1 =f32[T,n1], n1 i32, \
w2 ?u8[W], scales2 ?u8[W/4], d2 ?f16[D], y2 ?=f32[T,n2], n2 i32, w3 ?u8[W], scales3 ?u8[W/4], d3 ?f16[D], y3 ?=f32[T,n3], n3 i32, \
n_tokens i32)
matvec_rope: matvec_rope_<t>(w u8[W], scales ?u8[W/4], d f16[D], x s8[T,n_in], x_d any[T,blocks], sums ?i16[T,n_in/16], \
cosine f32[T,n], sine f32[T,n], y =f32[T,n_out], turned =f32[T,heads,2n]~, n_tokens i32, n_out i32, width i32, first i32, n i32, \
turned_stride i64)
matvec_rope: matvec_queries_<t>(w u8[W], scales ?u8[W/4], d f16[D], x f32[1,n_in], weight f32[n_in], cosine f32[1,n], sine f32[1,n], \
y =f32[1,n_out], turned =f32[1,heads,2n]~, normed ?=f32[1,n_in], n_out i32, width i32, first i32, n i32, turned_stride i64, eps f32, \
pos ?i32[1], kv ?f32[1,R+P], kv_weight ?f32[R], latent ?=f32[1,R+P], cache ?=f16[capacity,R+P], rank i32, \
key ?f32[1,J], key_weight ?f32[J], key_bias ?f32[J], keys ?=f16[capacity,J], key_n i32, key_eps f32)
matvec_ffn: matvec_gate_up_swiglu_<t>(gate u8[W], gate_scales ?u8[W/4], gate_d f16[D], up u8[W], up_scales ?u8[W/4], up_d f16[D], \
x s8[T,n_in], x_d any[T,blocks], sums ?i16[T,n_in/16], experts ?i32[pairs], y =f32[pairs,n_out], n_out i32, x_div i32, \
settled i32, logits ?f32[T,E], bias ?f32[E], routed ?=i32[T,K], weights ?=f32[T,K], n_experts i32, n_chosen i32, normalise i32, \
min_sum f32, scale f32, first i32, count i32)
matvec_ffn: matvec_down_combine_<t>(w u8[W], scales ?u8[W/4], d f16[D], x s8[T,K,n_in], x_d any[T,K,blocks], sums ?i16[T,K,n_in/16], \
experts i32[T,K], weights f32[T,K], beside ?f32[T,n_out], y =f32[T,n_out], n_out i32, settled i32, \
inboxes ?u64[world], calls ?i32[blocks], capacity i32, rank i32, world i32)
matvec_f32: matvec_f32_f32(w f32[n_out,n_in], x f32[T,n_in], y =f32[T,n_out], n_in i32, n_out i32, pending ?=i32[T,K], \
n_pending i32)
matmul: matmul_<t>(w u8[W], scales ?u8[W/4], d f16[D], x s8[T,n_in], x_d any[T,blocks], sums ?i16[T,n_in/16], order ?i32[pairs], \
tile_expert ?i32[tiles], tile_first ?i32[tiles], first ?i32[E+1], y =f32[pairs,n_out]~, n_tokens i32, n_out i32, \
n_matrices i32, x_div i32, y_stride i64)
matmul_decoded: matmul_decoded_<t>(w u8[W], grid ?s8[entries], x f32[T,n_in]~, order ?i32[pairs], tile_expert ?i32[tiles], \
tile_first ?i32[tiles], first ?i32[E+1], y =f32[pairs,n_out]~, n_tokens i32, n_in i32, n_out i32, n_matrices i32, x_div i32, \
x_stride i64, y_stride i64)
moe: select_experts_f32(score f32[T,E], experts =i32[T,K], n i32, n_chosen i32)
moe: route_f32(logits f32[T,E], bias ?f32[E], probs ?=f32[T,E], biased ?=f32[T,E], experts =i32[T,K], weights ?=f32[T,K], \
weights_norm ?=f32[T,K], weights_scaled =f32[T,K], n i32, n_chosen i32, normalise i32, min_sum f32, scale f32, \
first i32, count i32)
moe: moe_sort(experts i32[T,K], order =i32[T*K], first =i32[E+1], n_pairs i32, n_experts i32)
moe: moe_tiles(first i32[E+1], tile_expert =i32[tiles], tile_first =i32[tiles], n_experts i32, n_tiles i32, width i32)
moe: zero_pairs_f32(experts i32[pairs], y =f32[pairs,n]~, n i32, y_stride i64)
moe: combine_experts_f32(y f32[T,K,n], weights f32[T,K], out =f32[T,n], n_tokens i32, n_chosen i32, n i32)
moe: local_experts(experts i32[T,K], local =i32[T,K], n_pairs i32, first i32, count i32)
fetch: fetch_experts_<t>(host u8[E,bytes], experts i32[K], w =u8[W], scales ?=u8[W/4], d =f16[D], first i32, n_blocks i32)
host: hand_over(h f32[T,n], experts i32[T,K], weights f32[T,K], to_h =f32[T,n], to_experts =i32[T,K], to_weights =f32[T,K], calls =i32[1], \
ready =i32[1], n i32, n_pairs i32)
host: take_back_f32(sum f32[T,n], done i32[1], calls i32[1], beside ?f32[T,n], out =f32[T,n], n i32)
indexer: indexer_score_f32(q f32[T,I,J], keys f32[capacity,J], weights f32[T,I], pos i32[T], score =f32[T,S], heads i32, width i32)
indexer_f16: indexer_score_f16(q f32[T,I,J], keys f16[capacity,J], weights f32[T,I], pos i32[T], score =f32[T,S], width i32, \
chunks i32, scale f32, settled i32)
topk: select_top_k_f32(score f32[T,S], pos i32[T], chosen =i32[T,k], score_stride i64, k i32, settled i32)
topk: top_k_count(score f32[T,S], pos i32[T], histogram =i32[T,3,2112], score_stride i64, k i32, pass i32)
topk: top_k_tally(score f32[T,S], pos i32[T], histogram i32[T,3,2112], tally =i32[T,chunks,2], score_stride i64, k i32)
topk: top_k_place(score f32[T,S], pos i32[T], histogram i32[T,3,2112], tally i32[T,chunks,2], chosen =i32[T,k], score_stride i64, \
k i32)
attention: attention_f32(q f32[T,H,R+P], cache f32[capacity,R+P], top_k i32[T,n], pos i32[T], out =f32[T,H,R], heads i32, n i32, \
scale f32)
attention_f16: attention_f16(q f32[T,H,R+P], cache f16[capacity,R+P], top_k i32[T,n], pos i32[T], out ?=f32[T,H,R], \
part ?=f32[T,splits,H,R], part_ml ?=f32[T,splits,H,2], heads i32, n i32, splits i32, scale f32, settled i32)
attention: attention_merge_f32(part f32[T,splits,H,R], part_ml f32[T,splits,H,2], out =f32[T,H,R], q ?=s8[T,H,R], d ?=f16[T,H,R/32], \
heads i32, splits i32)
exchange: exchange_sum_f32(x f32[mine], y =f32[n], inboxes u64[world], calls =i32[blocks], n i32, first i32, n_mine i32, capacity i32, \
rank i32, world i32)
sample: best_logits_f32(logits f32[Y], best =u64[parts], n i32)
sample: greedy_f32(best u64[parts], id =i32[1], n_parts i32)
sample: temperature_f32(logits f32[Y], best u64[parts], step i64[1], id =i32[1], n i32, n_parts i32, temperature f32, seed u64)
sample: next_step(chosen i32[1], token =i32[1], pos =i32[1], step =i64[1])
"""

# Weight types that have integer kernels, and those that are decoded in the tile (values and bytes of a block: gguf).
FAST_TYPES = ("q8_0", "q2_k")
DECODED_TYPES = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq2_xxs", "iq2_xs",
    "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
)  # fmt: skip
TYPES = {
    "embed": DECODED_TYPES, "matmul_decoded": DECODED_TYPES, "matvec": FAST_TYPES, "matvec_rounding": ("q8_0",),
    "matvec_merge": ("q8_0",),
    "matvec_projections": FAST_TYPES, "matvec_rope": FAST_TYPES, "matvec_ffn": FAST_TYPES, "matmul": FAST_TYPES,
    "fetch": FAST_TYPES,
}  # fmt: skip

DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "s8": np.int8, "u8": np.uint8, "i16": np.int16, "i32": np.int32,
    "i64": np.int64, "u64": np.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """dtype: a key of DTYPES, or "any". axes: None for a number."""

    name: str
    dtype: str
    axes: tuple[str, ...] | None
    written: bool = False
    optional: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Kernel:
    name: str
    family: str
    arguments: tuple[Argument, ...]


def _argument(text: str) -> Argument:
    name, kind = text.split()
    flags, bare = kind[: len(kind) - len(kind.lstrip("?="))], kind.lstrip("?=").rstrip("~")
    dtype, _, axes = bare.rstrip("]").partition("[")
    return Argument(name, dtype, tuple(axes.split(",")) if axes else None, "=" in flags, "?" in flags, kind.endswith("~"))


def _parse(line: str):
    family, _, rest = line.partition(": ")
    name, _, rest = rest.rstrip(")").partition("(")
    arguments = []
    for part in rest.split(", "):
        arguments.append(_argument(part.strip()))
    for kind in TYPES.get(family, ("",)) if "<t>" in name else ("",):
        yield Kernel(name.replace("<t>", kind), family, tuple(arguments))


KERNELS = {kernel.name: kernel for line in TABLE.strip().splitlines() for kernel in _parse(line)}


@cache
def source(family: str) -> str:
    """The text that is compiled for a family."""
    names = ("preamble", *FAMILIES[family], family)
    return "\n".join(f'#line 1 "{name}.hip"\n' + read(name) for name in names)


@cache
def read(name: str) -> str:
    return files(__package__).joinpath(f"{name}.hip").read_text()
