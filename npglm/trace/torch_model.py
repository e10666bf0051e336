"""transformers' GlmMoeDsaForCausalLM with the weights of a GGUF, dequantised. Needs the extra `npglm[oracle]`."""

import numpy as np

from npglm.checkpoint import Checkpoint
from npglm.errors import NpglmError


def need_torch():
    """torch and transformers, or an NpglmError that names the extra."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise NpglmError(f"{error.name} is not installed: pip install 'npglm[oracle]'") from None
    return torch, transformers


def torch_config(config):
    """npglm's GlmConfig -> transformers' GlmMoeDsaConfig, eager attention and experts."""
    _, transformers = need_torch()
    c = config
    return transformers.GlmMoeDsaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        moe_intermediate_size=c.expert_ffn,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_heads,
        n_shared_experts=c.n_shared,
        n_routed_experts=c.n_experts,
        routed_scaling_factor=c.expert_scale,
        kv_lora_rank=c.kv_rank,
        q_lora_rank=c.q_rank,
        qk_rope_head_dim=c.rope,
        v_head_dim=c.v_dim,
        qk_nope_head_dim=c.nope,
        num_experts_per_tok=c.n_chosen,
        norm_topk_prob=c.expert_norm,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        index_topk=c.indexer_top_k,
        index_head_dim=c.indexer_dim,
        index_n_heads=c.indexer_heads,
        first_k_dense_replace=c.n_dense,
        indexer_types=["full" if full else "shared" for full in c.full],
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def glm_from_checkpoint(checkpoint: Checkpoint, dtype=None, low_rank_eps: float | None = None):
    """The model in evaluation mode, every weight decoded from the GGUF and cast to `dtype` (default torch.float32).

    low_rank_eps: eps of the q_a and kv_a norms, default the checkpoint's. transformers 5.24.0 itself leaves these two at 1e-6 whatever
    the config says (hf#48762): pass 1e-6 to get what its users get.
    """
    torch, transformers = need_torch()
    config, w = checkpoint.config, checkpoint.weights
    with torch.device("meta"):
        model = transformers.GlmMoeDsaForCausalLM(torch_config(config))
    model = model.to(dtype or torch.float32).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its tables are no weights, so they are still empty
    expected, filled = set(model.state_dict()), set()
    state = model.state_dict()
    for name, array in _weights(w, config):
        if name not in expected or state[name].shape != array.shape:
            raise NpglmError(f"transformers has no {name} of shape {list(array.shape)}")
        with torch.no_grad():
            state[name].copy_(torch.from_numpy(np.array(array)))
        filled.add(name)
    if expected != filled:
        raise NpglmError(f"the checkpoint has nothing for transformers' {min(expected - filled)}")
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config.rms_eps if low_rank_eps is None else low_rank_eps
    return model


def _weights(w, config):
    """(transformers' name, f32 array) of every weight, one at a time."""
    yield "model.embed_tokens.weight", w.token_embd.decode()
    yield "model.norm.weight", w.output_norm.decode()
    yield "lm_head.weight", w.output.decode()
    for i, layer in enumerate(w.layers):
        for name, array in _layer_weights(layer, config, i):
            yield f"model.layers.{i}.{name}", array


def _layer_weights(w, config, i):
    yield "input_layernorm.weight", w.attn_norm.decode()
    yield "post_attention_layernorm.weight", w.ffn_norm.decode()
    for name, attribute in {
        "q_a_proj": "attn_q_a",
        "q_a_layernorm": "attn_q_a_norm",
        "q_b_proj": "attn_q_b",
        "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "kv_a_layernorm": "attn_kv_a_norm",
        "o_proj": "attn_output",
    }.items():
        yield f"self_attn.{name}.weight", getattr(w, attribute).decode()
    k, v = w.attn_k_b.decode(), w.attn_v_b.decode()  # [H,R,N] [H,V,R]
    kv_b = np.concatenate([k.transpose(0, 2, 1), v], axis=1)  # [H,N+V,R]
    yield "self_attn.kv_b_proj.weight", kv_b.reshape(-1, config.kv_rank)
    if config.full[i]:
        yield "self_attn.indexer.wq_b.weight", w.indexer_attn_q_b.decode()
        yield "self_attn.indexer.wk.weight", w.indexer_attn_k.decode()
        yield "self_attn.indexer.k_norm.weight", w.indexer_k_norm.decode()
        yield "self_attn.indexer.k_norm.bias", w.indexer_k_norm_bias.decode()
        yield "self_attn.indexer.weights_proj.weight", w.indexer_proj.decode()
    if not config.is_moe(i):
        for name in ("gate", "up", "down"):
            yield f"mlp.{name}_proj.weight", getattr(w, f"ffn_{name}").decode()
        return
    yield "mlp.gate.weight", w.ffn_gate_inp.decode()
    bias = np.zeros(config.n_experts, np.float32) if w.exp_probs_b is None else w.exp_probs_b.decode()
    yield "mlp.gate.e_score_correction_bias", bias
    yield "mlp.experts.gate_up_proj", np.concatenate([w.ffn_gate_exps.decode(), w.ffn_up_exps.decode()], axis=1)  # [E,2G,D]
    yield "mlp.experts.down_proj", w.ffn_down_exps.decode()
    for name in ("gate", "up", "down"):
        yield f"mlp.shared_experts.{name}_proj.weight", getattr(w, f"ffn_{name}_shexp").decode()
