"""The model: transformers' GlmMoeDsaForCausalLM in the checkpoint's shape, with what training needs put into it.

transformers runs the indexer under no_grad and returns indices only. `prepare_for_training` therefore gives each
attention layer a forward pass of its own, which computes the same function, also gives the indexer a loss, and can
attend to everything or to the most recent tokens instead of the indexer's choice.
"""

import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from .q2k import grid_q2_k, round_to_grid

INDEXER_TYPES = ["full", "full", "full", "shared", "full", "shared"]
TOP_K = 32
CONTEXT = 2048


def make_config(vocab_size: int, end_id: int) -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=6,
        first_k_dense_replace=3,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=96,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=512,
        routed_scaling_factor=2.5,
        indexer_types=INDEXER_TYPES,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=TOP_K,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=None,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )


def make_model(vocab_size: int, end_id: int) -> GlmMoeDsaForCausalLM:
    model = GlmMoeDsaForCausalLM(make_config(vocab_size, end_id))
    for layer in model.model.layers:  # transformers leaves these two at 1e-6
        layer.self_attn.q_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
    return model


class Pass:
    """What the attention layers of one model share: the mode they run in, and the indexer's state and losses."""

    def __init__(self) -> None:
        self.select = "indexer"  # indexer | dense | recent (the last TOP_K tokens)
        self.dropout = 0.0
        self.learn_indexer = False
        self.losses: list[torch.Tensor] = []
        self.scores: torch.Tensor | None = None  # the last full layer's indexer scores [B, T, T]
        self.allowed: torch.Tensor | None = None  # what that layer attends to [B or 1, T, T]


def index_scores(indexer: nn.Module, hidden: torch.Tensor, q_latent: torch.Tensor, rope: tuple) -> torch.Tensor:
    """The indexer's scores [B, T, T], as its own forward pass computes them, with gradients."""
    batch, length, _ = hidden.shape
    split = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q_rot, q_pass = indexer.wq_b(q_latent).view(batch, length, indexer.n_heads, -1).split(split, -1)
    k_rot, k_pass = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2).split(split, -1)
    q_rot, k_rot = glm.apply_rotary_pos_emb_interleave(q_rot, k_rot, *rope, unsqueeze_dim=2)
    q, k = torch.cat([q_rot, q_pass], -1), torch.cat([k_rot, k_pass], -1).squeeze(2)
    scores = F.relu((q.transpose(1, 2) @ k.transpose(1, 2).unsqueeze(1)).float() * indexer.softmax_scale)  # [B, I, T, T]
    weights = indexer.weights_proj(hidden).float() * indexer.n_heads**-0.5  # [B, T, I]
    return (scores * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


def choose(state: Pass, scores: torch.Tensor | None, causal: torch.Tensor) -> torch.Tensor:
    """True where a query may look [B or 1, T, T]."""
    if state.select == "dense":
        return causal
    if state.select == "recent":
        return causal & ~causal.tril(-TOP_K)
    picked = scores.detach().topk(min(TOP_K, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, picked, True) & causal


def attention_forward(self, hidden_states, position_embeddings, prev_topk_indices=None, **_):
    """GlmMoeDsaAttention.forward without a cache; what it selects by and learns from is in self.state."""
    state, rope = self.state, position_embeddings
    batch, length, _ = hidden_states.shape
    q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_latent).view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
    q_pass, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    latent, k_rot = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    q_rot, k_rot = glm.apply_rotary_pos_emb_interleave(q_rot, k_rot.unsqueeze(1), *rope)
    kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
    k_pass, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], -1)
    logits = q_pass @ k_pass.transpose(2, 3) + q_rot.to(q.dtype) @ k_rot.to(q.dtype).transpose(2, 3)  # [B, H, T, T]

    if self.indexer is not None:
        causal = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
        needed = state.learn_indexer or state.select == "indexer"
        scores = index_scores(self.indexer, hidden_states.detach(), q_latent.detach(), rope) if needed else None
        state.scores = scores.masked_fill(~causal, -torch.inf) if needed else None
        state.allowed = choose(state, state.scores, causal)

    allowed = state.allowed.unsqueeze(1)
    weights = (logits * self.scaling).masked_fill(~allowed, -torch.inf).softmax(-1, dtype=torch.float32)
    if state.learn_indexer:  # KL from the attention summed over heads to the indexer's softmax, over what was allowed
        target = weights.detach().mean(1)
        guess = state.scores.masked_fill(~state.allowed, -torch.inf).log_softmax(-1)
        divergence = torch.special.xlogy(target, target) - target * guess.masked_fill(~state.allowed, 0.0)
        state.losses.append(divergence.sum(-1).mean())
    out = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, length, -1)
    return F.dropout(self.o_proj(out), state.dropout, self.training), None, prev_topk_indices


def prepare_for_training(model: GlmMoeDsaForCausalLM) -> Pass:
    """Gives the attention layers the forward pass above; returns the state that steers them."""
    state = Pass()
    for layer in model.model.layers:
        layer.self_attn.state = state
        layer.self_attn.forward = types.MethodType(attention_forward, layer.self_attn)
        layer.mlp.register_forward_hook(lambda module, _, out: F.dropout(out, state.dropout, module.training))
    for gate in gates(model):  # the router stays in f32 under autocast
        gate.plain_forward = gate.forward
        gate.forward = types.MethodType(router_forward, gate)
    return state


def router_forward(self, hidden_states):
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits, weights, chosen = self.plain_forward(hidden_states.float())
    if self.training:
        self.load = F.one_hot(chosen.flatten(), self.num_experts).sum(0)
    return logits, weights, chosen


def gates(model: GlmMoeDsaForCausalLM) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, glm.GlmMoeDsaTopkRouter))


@torch.no_grad()
def balance_experts(model: GlmMoeDsaForCausalLM, rate: float) -> None:
    """Moves each router's selection bias towards an even load (no loss term)."""
    for gate in gates(model):
        load = gate.load.float()
        gate.e_score_correction_bias += rate * (load.mean() - load).sign()


class Rounded(nn.Module):
    """A weight as Q2_K holds it, with a straight-through gradient; unrounded while `active` is false.

    The grid (scales and minima) is searched for anew every SEARCH_EVERY passes, the rounding to it done at each.
    """

    SEARCH_EVERY = 8

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.active, self.passes, self.grid = dtype, False, 0, None

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if self.active:
            plain = weight.detach()
            if self.passes % self.SEARCH_EVERY == 0:
                self.grid = grid_q2_k(plain)
            self.passes += 1
            weight = weight + (round_to_grid(plain, *self.grid) - plain)
        return weight.to(self.dtype)


def add_rounding(model: GlmMoeDsaForCausalLM, dtype: torch.dtype) -> list[Rounded]:
    """Puts Q2_K around the routed experts (in `dtype`: their grouped product is not autocast).

    The other matrices become Q8_0, whose error of half a per cent needs no training.
    """
    switches = []
    for module in model.modules():
        if isinstance(module, glm.GlmMoeDsaExperts):
            for name in ("gate_up_proj", "down_proj"):
                switches.append(Rounded(dtype))
                parametrize.register_parametrization(module, name, switches[-1], unsafe=True)
    return switches


def plain_state(model: GlmMoeDsaForCausalLM) -> dict[str, torch.Tensor]:
    """The unrounded weights under transformers' names, without what add_rounding put around them."""
    state = {}
    for name, value in model.state_dict().items():
        name = name.replace(".parametrizations", "").removesuffix(".original")
        state[name] = value.detach().float().cpu().contiguous()
    return state
