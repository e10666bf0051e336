"""The probes: one name per stage of the forward pass, with its axes. forward.py calls them, every trace holds them.

`NAME-<layer>` in a trace; the stages outside the layers have no suffix. Arrays are row-major; axis names are config.py's.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from npglm.config import GlmConfig

MODEL, EVERY, FULL, DENSE, MOE = "model", "every layer", "full layers", "dense layers", "MoE layers"


@dataclass(frozen=True)
class Probe:
    """axes: of one token's row, after T. "S" is the number of tokens of the call; "top_k" is min(top_k, S)."""

    name: str
    axes: str
    where: str = EVERY
    dtype: type = np.float32

    def on(self, layer: int, config: GlmConfig) -> bool:
        return {
            EVERY: True,
            FULL: config.full[layer],
            DENSE: not config.is_moe(layer),
            MOE: config.is_moe(layer),
        }[self.where]

    def shape(self, config: GlmConfig, n_tokens: int, layer: int | None = None) -> tuple[int, ...]:
        """The full shape [T, ...]. ffn_gate/up/swiglu are F wide on dense layers; on MoE layers they are the shared experts'."""
        sizes = config.axes | {"S": n_tokens, "top_k": min(config.indexer_top_k, n_tokens)}
        if layer is not None and config.is_moe(layer):
            sizes["F"] = sizes["S*G"]
        return (n_tokens, *(sizes[axis] for axis in self.axes.split()))


# In the order in which forward.py makes them.
PROBES = {
    probe.name: probe
    for probe in (
        Probe("embd", "D", MODEL),
        Probe("attn_norm", "D"),
        Probe("q_a", "Q"),
        Probe("q_a_norm", "Q"),
        Probe("q", "H*(N+P)"),  # per head nope, then the rope part before rope
        Probe("q_pe", "H P"),  # after rope, pairs in place
        Probe("q_nope_absorbed", "H R"),
        Probe("kv_cmpr_pe", "R+P"),  # raw
        Probe("kv_cmpr", "R"),  # after its norm
        Probe("k_pe", "P"),  # after rope
        Probe("indexer_k", "J", FULL),  # rope dims first, after rope, before any Hadamard
        Probe("indexer_q", "I J", FULL),
        Probe("indexer_weights", "I", FULL),  # already times 1/sqrt(I*J)
        Probe("indexer_score", "S", FULL),  # -inf where s > position
        Probe("top_k", "top_k", EVERY, np.int32),  # ascending, -1 at the end
        Probe("kqv", "H R"),  # latent attention output
        Probe("kqv_out", "H*V"),  # before wo
        Probe("attn_out", "D"),  # after wo
        Probe("ffn_inp", "D"),
        Probe("ffn_norm", "D"),
        Probe("ffn_moe_logits", "E", MOE),
        Probe("ffn_moe_probs", "E", MOE),
        Probe("ffn_moe_probs_biased", "E", MOE),
        Probe("ffn_moe_topk", "K", MOE, np.int32),
        Probe("ffn_moe_weights", "K", MOE),
        Probe("ffn_moe_weights_norm", "K", MOE),
        Probe("ffn_moe_weights_scaled", "K", MOE),
        Probe("ffn_moe_gate", "K G", MOE),  # these four in ffn_moe_topk order
        Probe("ffn_moe_up", "K G", MOE),
        Probe("ffn_moe_swiglu", "K G", MOE),
        Probe("ffn_moe_down", "K D", MOE),  # unweighted
        Probe("ffn_moe_out", "D", MOE),
        Probe("ffn_gate", "F"),
        Probe("ffn_up", "F"),
        Probe("ffn_swiglu", "F"),
        Probe("ffn_shexp", "D", MOE),
        Probe("ffn_out", "D"),  # routed + shared, or dense; before the residual
        Probe("l_out", "D"),
        Probe("result_norm", "D", MODEL),
        Probe("result_output", "Y", MODEL),
    )
}


def probe_names(config: GlmConfig, layers=None, patterns=None) -> dict[str, tuple[Probe, int | None]]:
    """Trace names, in graph order -> (probe, layer).

    layers: the layers wanted (default all); embd always counts, result_* only when the model's last layer is among them.
    patterns: shell patterns, one of which must match the name with or without its layer suffix.
    """
    layers = range(config.n_layers) if layers is None else sorted(layers)
    outside = [p for p in PROBES.values() if p.where == MODEL]
    names = {"embd": (PROBES["embd"], None)}
    for i in layers:
        names |= {f"{p.name}-{i}": (p, i) for p in PROBES.values() if p.where != MODEL and p.on(i, config)}
    if config.n_layers - 1 in layers:
        names |= {p.name: (p, None) for p in outside}
    if patterns is None:
        return names
    return {n: v for n, v in names.items() if any(fnmatchcase(n, p) or fnmatchcase(v[0].name, p) for p in patterns)}


class NoProbe:
    """Records nothing."""

    def __call__(self, name: str, array) -> None:
        pass

    def layer(self, index: int) -> "NoProbe":
        return self


NO_PROBE = NoProbe()


class Keep(NoProbe):
    """Keeps a copy of every array, by its name in a trace. seen: {NAME-layer: array}."""

    def __init__(self):
        self.suffix, self.seen = "", {}

    def layer(self, index: int) -> "Keep":
        self.suffix = f"-{index}"
        return self

    def __call__(self, name: str, array) -> None:
        self.seen[name if PROBES[name].where == MODEL else name + self.suffix] = np.array(array)
