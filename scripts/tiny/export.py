"""From transformers' weights to the GGUF: names and layouts as llama.cpp's converter has them, ggml's own quantiser."""

import ctypes
import json
import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from . import corpus, model

NAME = "Tiny GLM"
DESCRIPTION = "A 27M-parameter glm-dsa model trained for npglm's tests and demos: countries, elements, plain English."
# GGUF name of each tensor of a layer, by transformers' name below `model.layers.N.`
LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
TOP_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def to_gguf(weights: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """GGUF's tensors in NumPy's axis order (ggml's reversed)."""
    tensors = {}
    for name, value in weights.items():
        if name in TOP_TENSORS:
            tensors[TOP_TENSORS[name]] = value
            continue
        layer, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
        block = f"blk.{layer}."
        if inner == "self_attn.kv_b_proj.weight":  # [H * (N + V), R] -> K part [H, R, N], V part [H, V, R]
            heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            tensors[block + "attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            tensors[block + "attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        elif inner == "mlp.experts.gate_up_proj":  # [E, 2G, D]
            gate, up = np.split(value, 2, axis=1)
            tensors[block + "ffn_gate_exps.weight"], tensors[block + "ffn_up_exps.weight"] = gate, up
        else:
            tensors[block + LAYER_TENSORS[inner]] = value
    return tensors


def from_gguf(tensors: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """The inverse of to_gguf."""
    weights = {name: tensors[short] for name, short in TOP_TENSORS.items()}
    names = {short: name for name, short in LAYER_TENSORS.items()}
    for layer in range(config.num_hidden_layers):
        block, start = f"model.layers.{layer}.", f"blk.{layer}."
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        kv_b = np.concatenate([own.pop("attn_k_b.weight").swapaxes(1, 2), own.pop("attn_v_b.weight")], axis=1)
        weights[block + "self_attn.kv_b_proj.weight"] = kv_b.reshape(-1, config.kv_lora_rank)
        if "ffn_gate_exps.weight" in own:
            gate_up = np.concatenate([own.pop("ffn_gate_exps.weight"), own.pop("ffn_up_exps.weight")], axis=1)
            weights[block + "mlp.experts.gate_up_proj"] = gate_up
        weights.update({block + names[short]: value for short, value in own.items()})
    return weights


def type_of(name: str, value: np.ndarray) -> Type:
    if value.ndim == 1 or "ffn_gate_inp" in name:
        return Type.F32
    return Type.Q2_K if "_exps" in name else Type.Q8_0


class Quantiser:
    """ggml's own quantiser, out of the libraries that llama-cpp-python brings (or the one file given)."""

    def __init__(self, library: Path | None = None):
        if library is None:
            import llama_cpp

            library = Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"
        self.chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self.chunk.restype = ctypes.c_size_t
        self.chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def __call__(self, value: np.ndarray, to: Type) -> np.ndarray:
        value = np.ascontiguousarray(value, dtype=np.float32)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[to]
        row = value.shape[-1]
        out = np.empty((*value.shape[:-1], row // block_size * block_bytes), dtype=np.uint8)
        written = self.chunk(to, value.ctypes.data, out.ctypes.data, 0, value.size // row, row, None)
        if written != out.nbytes:
            raise RuntimeError(f"ggml wrote {written} bytes of {out.nbytes}")
        return out


def write_metadata(writer: gguf.GGUFWriter, config, tokenizer: Tokenizer) -> None:
    arch = "glm-dsa"
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_size_label("27M")
    writer.add_languages(["en"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32(f"{arch}.attention.indexer.head_count", config.index_n_heads)
    writer.add_uint32(f"{arch}.attention.indexer.key_length", config.index_head_dim)
    writer.add_uint32(f"{arch}.attention.indexer.top_k", config.index_topk)
    writer.add_array(f"{arch}.attention.indexer.types", [kind == "full" for kind in config.indexer_types])

    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    kinds = {token: gguf.TokenType.CONTROL for token in corpus.CONTROL_TOKENS}
    kinds |= {token: gguf.TokenType.USER_DEFINED for token in corpus.MARKUP_TOKENS}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_unk_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_bos_token_id(tokenizer.token_to_id("[gMASK]"))
    writer.add_eot_token_id(tokenizer.token_to_id("<|user|>"))
    writer.add_eom_token_id(tokenizer.token_to_id("<|observation|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(corpus.TEMPLATE)


def write(path: Path, weights: dict[str, np.ndarray], tokenizer: Tokenizer, end_id: int, library: Path | None = None) -> None:
    config = model.make_config(tokenizer.get_vocab_size(), end_id)
    quantise = Quantiser(library)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "glm-dsa")
    write_metadata(writer, config, tokenizer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q2_K)
    for name, value in to_gguf(weights, config).items():
        kind = type_of(name, value)
        data = np.ascontiguousarray(value, dtype=np.float32) if kind == Type.F32 else quantise(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path, config) -> dict[str, np.ndarray]:
    """The GGUF's weights, dequantised, under transformers' names."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        tensors[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return from_gguf(tensors, config)
