"""Faults planted in transformers' own modules, recorded through npglm.trace.torch_record as a user would. Needs the extra [oracle]."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as glm

from npglm.trace.torch_model import glm_from_checkpoint
from npglm.trace.torch_record import torch_recorder


@dataclass(frozen=True)
class TorchPlant:
    """op, layer: the first recorded probe at or behind the broken op. families: of trace.faults that name it; () = none can."""

    name: str
    number: str
    op: str
    layer: int | None
    families: tuple[str, ...]
    make: Callable
    tokens: int = 5
    most: int = 1 << 30  # tokens, from which on another probe shows it first


TORCH_PLANTS: list[TorchPlant] = []


def plant(name, number, op, layer, families, tokens=5, most=1 << 30):
    def register(make):
        names = tuple(f.strip() for f in families.split(",") if f.strip())
        TORCH_PLANTS.append(TorchPlant(name, number, op, layer, names, make, tokens, most))
        return make

    return register


def record(checkpoint, tokens, broken: TorchPlant | None = None, dtype=torch.float32) -> dict[str, np.ndarray]:
    model = glm_from_checkpoint(checkpoint, dtype)
    with torch.no_grad():
        if broken:
            broken.make(model)
        with torch_recorder(model, "transformers") as recorder:
            model(torch.tensor(np.asarray(tokens, np.int64))[None], use_cache=False)
    return recorder.arrays


def attention(model, layer):
    return model.model.layers[layer].self_attn


def mlp(model, layer):
    return model.model.layers[layer].mlp


def half_split(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) * sin for x in (q, k))


def with_global(module, name, value):
    """Run module.forward with another global of the modelling file."""
    forward = module.forward

    def wrapped(*args, **kwargs):
        right = getattr(glm, name)
        setattr(glm, name, value)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(glm, name, right)

    module.forward = wrapped


@plant("q_a norm eps 1e-3", "hf#48762", "q_a_norm", 1, "norm eps")
def _(model):
    attention(model, 1).q_a_layernorm.variance_epsilon = 1e-3


@plant("kv_a norm eps 1e-6 as shipped", "hf#48762", "kv_cmpr", 0, "norm eps")
def _(model):
    attention(model, 0).kv_a_layernorm.variance_epsilon = 1e-6


@plant("input norm has the other norm's weight", "7", "attn_norm", 1, "wrong tensor")
def _(model):
    layer = model.model.layers[1]
    layer.input_layernorm.weight.copy_(layer.post_attention_layernorm.weight)


@plant("gate and up swapped", "7", "ffn_gate", 0, "wrong tensor")
def _(model):
    m = mlp(model, 0)
    m.gate_proj.weight.data, m.up_proj.weight.data = m.up_proj.weight.data, m.gate_proj.weight.data


@plant("gelu", "-", "ffn_swiglu", 0, "activation")
def _(model):
    mlp(model, 0).act_fn = torch.nn.GELU(approximate="tanh")


@plant("routed factor dropped", "40", "ffn_moe_weights_scaled", 1, "router, constant factor")
def _(model):
    mlp(model, 1).gate.routed_scaling_factor = 1.0


@plant("routed factor twice", "41", "ffn_moe_weights_scaled", 2, "router, constant factor")
def _(model):
    mlp(model, 2).gate.routed_scaling_factor = 6.25


@plant("weights not normalised", "39", "ffn_moe_weights_scaled", 1, "router")
def _(model):
    mlp(model, 1).gate.norm_topk_prob = False


@plant("router bias in bf16", "36,37", "ffn_moe_topk", 1, "router bias precision, expert choice", 64)
def _(model):
    bias = mlp(model, 1).gate.e_score_correction_bias
    bias.copy_(bias.bfloat16().float())


@plant("router bias zero", "36", "ffn_moe_topk", 1, "router, expert choice", 64)
def _(model):
    mlp(model, 1).gate.e_score_correction_bias.zero_()


@plant("shared expert x 0.4", "42", "ffn_out", 1, "sum of two")
def _(model):
    m = mlp(model, 1)

    def forward(x):
        _, weights, chosen = m.gate(x)
        return m.experts(x.view(-1, x.shape[-1]), chosen, weights).view(x.shape) + 0.4 * m.shared_experts(x)

    m.forward = forward


@plant("next expert's weights", "44", "ffn_moe_out", 1, "wrong expert")
def _(model):
    experts = mlp(model, 1).experts
    forward = experts.forward
    experts.forward = lambda x, chosen, weights: forward(x, (chosen + 1) % experts.num_experts, weights)


@plant("indexer rope half-split", "8,9,10,14", "top_k", 1, "rope pairs half-split", 64)
def _(model):
    with_global(attention(model, 1).indexer, "apply_rotary_pos_emb_interleave", half_split)


@plant("indexer key norm is RMSNorm", "17", "top_k", 1, "another norm", 64)
def _(model):
    norm = attention(model, 1).indexer.k_norm
    norm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight + norm.bias


@plant("attention rope half-split", "8", "kqv_out", 1, "rope pairs half-split")
def _(model):
    right, indexer = glm.apply_rotary_pos_emb_interleave, attention(model, 1).indexer
    with_global(indexer, "apply_rotary_pos_emb_interleave", right)
    with_global(attention(model, 1), "apply_rotary_pos_emb_interleave", half_split)


@plant("mscale squared of YaRN 40", "16", "kqv_out", 1, "attention scale")
def _(model):
    attention(model, 1).scaling *= (0.1 * np.log(40) + 1) ** 2


@plant("attention scale of nope dims", "16", "kqv_out", 2, "attention scale")
def _(model):
    attention(model, 2).scaling = attention(model, 2).qk_nope_head_dim ** -0.5


@plant("rope theta 1e6", "12,13", "kqv_out", 0, "rope base or dims", most=8)
def _(model):
    n = model.model.rotary_emb.inv_freq.shape[0]
    model.model.rotary_emb.inv_freq.copy_(1e6 ** (-torch.arange(n) / n))


@plant("residual twice", "35", "ffn_inp", 1, "sum of two")
def _(model):
    attn = attention(model, 1)
    norm, kept = model.model.layers[1].input_layernorm, {}
    normed, attended = norm.forward, attn.forward
    norm.forward = lambda x: normed(kept.setdefault("x", x))

    def twice(*args, **kwargs):
        out, *rest = attended(*args, **kwargs)
        return (out + kept["x"], *rest)

    attn.forward = twice


@plant("heads of q permuted", "48", "q", 1, "moved or missing columns")
def _(model):
    attn = attention(model, 1)
    w = attn.q_b_proj.weight
    w.copy_(w.view(attn.num_heads, -1, w.shape[1]).roll(1, 0).reshape(w.shape).clone())


@plant("half of the down projection's sum", "54", "ffn_out", 0, "parts of the sum")
def _(model):
    w = mlp(model, 0).down_proj.weight
    w[:, w.shape[1] // 2 :] = 0


@plant("output projection in fp8", "46", "attn_out", 1, "precision of the weights")
def _(model):
    w = attention(model, 1).o_proj.weight
    scale = w.abs().max() / 448
    w.copy_((w / scale).to(torch.float8_e4m3fn).float() * scale)


@plant(
    "output projection in bf16",
    "72",
    "attn_out",
    2,
    "precision of the weights, precision of the inputs, precision of the output",
)
def _(model):
    o = attention(model, 2).o_proj
    o.forward = lambda x: torch.nn.functional.linear(x.bfloat16(), o.weight.bfloat16()).float()


@plant("o_proj sees the last 3 rows as zero", "53", "attn_out", 1, "moved or missing rows", 9)
def _(model):
    o = attention(model, 1).o_proj
    forward = o.forward

    def tail(x):
        y = forward(x)
        y[:, -3:] = 0
        return y

    o.forward = tail


@plant("logits x 2", "-", "result_output", None, "constant factor")
def _(model):
    model.lm_head.weight.mul_(2)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


@plant("NaN in one expert", "56", "ffn_moe_out", 1, "")
def _(model):
    mlp(model, 1).experts.down_proj[:] = torch.where(
        torch.arange(mlp(model, 1).experts.num_experts)[:, None, None] % 2 == 0, torch.nan, mlp(model, 1).experts.down_proj
    )


@plant("experts' up projection of layer 1 is layer 2's", "7", "ffn_moe_out", 1, "wrong tensor")
def _(model):
    g = mlp(model, 1).experts.gate_up_proj
    half = g.shape[1] // 2
    g[:, half:] = mlp(model, 2).experts.gate_up_proj[:, half:]
