"""The production forward pass: one function over the op set that is passed in. reference/forward.py is the same lines in NumPy."""

from npglm.trace.probes import NO_PROBE


def forward(weights, config, cache, tokens, pos, ops, probe=NO_PROBE, n_out=None, last_layer=None):
    """Run T new tokens through the model.

    tokens, pos: int32 [T] token ids and their positions, which follow the cached ones. cache: npglm.cache.Cache, written at pos.
    n_out: how many of the last rows get logits (default T). last_layer: stop after this layer and return its output.
    Returns logits [n_out, Y] (or l_out [T,D]).
    """
    c = config
    table = ops.rope_table(pos, c.rope, c.rope_theta)  # cos, sin [T,P/2]
    x = ops.embed(tokens, weights.token_embd)  # [T,D]
    probe("embd", x)
    norms = [*(w.attn_norm for w in weights.layers), weights.output_norm]
    h = ops.rms_norm(x, norms[0], c.rms_eps)  # [T,D]
    for i, w in enumerate(weights.layers):
        mark = probe.layer(i)
        mark("attn_norm", h)
        q_a, q = ops.projections(h, w, cache.kv[i], table, pos, c, mark)  # [T,Q] [T,H,R+P]
        if c.full[i]:
            top_k = ops.indexer(h, q_a, w, cache.index_k[i], table, pos, c, mark)  # [T,min(top_k,S)]
        mark("top_k", top_k)  # shared layers carry the last one on
        kqv = ops.attend(q, w, cache.kv[i], top_k, pos, c, mark)  # [T,H*V]
        attn = ops.linear(kqv, w.attn_output)  # [T,D]
        mark("attn_out", attn)
        x, h = ops.add_norm(x, attn, w.ffn_norm, c.rms_eps)  # [T,D] [T,D]
        mark("ffn_inp", x)
        mark("ffn_norm", h)
        ffn = ops.moe_ffn(h, w, c, mark) if c.is_moe(i) else ops.dense_ffn(h, w, mark)  # [T,D]
        mark("ffn_out", ffn)
        x, h = ops.add_norm(x, ffn, norms[i + 1], c.rms_eps)
        mark("l_out", x)
        if i == last_layer:
            return x
    h = h[-(n_out or len(h)) :]  # [n_out,D]
    probe("result_norm", h)
    logits = ops.linear(h, weights.output)  # [n_out,Y]
    probe("result_output", logits)
    return logits
