"""Five synthetic models of different shapes for the live oracles.

llama.cpp's limits, as found with 0.3.36: indexer_dim a power of two from 64 on (it rotates the keys by a Hadamard matrix); quantised rows
of whole blocks; norms and router in F32; a tokenizer must be there. Head dims, ranks and counts are free, with flash attention too. Q4_1 and Q5_1 are left
out: llama.cpp rounds the sums of activation blocks to f16 for them, which `ggml` numerics does not (1e-3).
"""

from gguf import GGMLQuantizationType as T
from synth import Shape

MODELS = {
    1: {},  # synth's default: 2 dense + 4 MoE layers
    2: {  # Unsloth-like mix, MTP block, two shared experts, no indexer tensors on shared layers
        "shape": Shape(
            vocab=331, hidden=512, n_layers=5, n_dense=1, full=(True, False, False, True, False), n_heads=7, nope=160, rope=32, v_dim=64,
            q_rank=288, kv_rank=192, indexer_heads=11, indexer_dim=128, indexer_top_k=13, ffn=768, n_experts=14, n_chosen=6, n_shared=2,
            expert_ffn=256, rope_theta=1e6,
        ),
        "types": {
            "ffn_gate_exps": T.IQ2_XS, "ffn_up_exps": T.IQ2_XXS, "ffn_down_exps": T.IQ3_XXS, "*_shexp": T.Q5_K, "output": T.Q6_K,
            "token_embd": T.Q4_K, "attn_output": T.IQ4_NL, "ffn_down": T.IQ4_XS,
        },
        "mtp": 1,
        "indexer_on_shared": False,
    },
    3: {  # all MoE, one expert, no bias, tied output, scale 1: the nodes that llama.cpp leaves out
        "shape": Shape(
            vocab=302, hidden=256, n_layers=3, n_dense=0, full=(True, True, False), n_heads=9, nope=64, rope=48, v_dim=96, q_rank=160,
            kv_rank=32, indexer_heads=2, indexer_dim=64, indexer_top_k=5, n_experts=6, n_chosen=1, expert_ffn=768, expert_scale=1.0,
            rms_eps=1e-6,
        ),
        "types": {"ffn_*_exps": T.Q4_K, "*_shexp": T.Q3_K, "attn_q_b": T.Q5_0, "attn_kv_a_mqa": T.Q4_0},
        "bias": False,
        "tied": True,
    },
    4: {  # floats; every token is chosen in short prompts; weights not normalised
        "shape": Shape(
            vocab=367, hidden=320, n_layers=4, n_dense=2, full=(True, False, True, True), n_heads=3, nope=36, rope=20, v_dim=44, q_rank=72,
            kv_rank=60, indexer_heads=6, indexer_dim=64, indexer_top_k=40, ffn=448, n_experts=13, n_chosen=5, expert_ffn=192,
        ),
        "types": {
            "*norm*": T.F32, "ffn_gate_inp": T.F32, "ffn_*_exps": T.BF16, "attn_*": T.F16, "indexer.*": T.BF16, "*_shexp": T.F32,
            "ffn_*": T.F16, "output": T.F32,
        },
        "metadata": {"glm-dsa.expert_weights_norm": False},
    },
    5: {  # one head of each kind, and the last layers dense on their own top-k
        "shape": Shape(
            vocab=419, hidden=512, n_layers=4, n_dense=3, full=(True, False, True, True), n_heads=1, nope=192, rope=64, v_dim=256,
            q_rank=128, kv_rank=448, indexer_heads=1, indexer_dim=256, indexer_top_k=7, ffn=1024, n_experts=19, n_chosen=8,
            expert_ffn=256,
        ),
        "types": {"ffn_*_exps": T.IQ1_M, "ffn_down": T.IQ2_S, "ffn_up": T.IQ3_S, "ffn_gate": T.Q6_K, "*_shexp": T.MXFP4},
    },
}  # fmt: skip
LENGTHS = {
    1: (9, 65),
    2: (31, 66),
    3: (1, 64),
    4: (17, 63),
    5: (12, 100),
}  # llama.cpp's flash attention changes its ways at 64 tokens
