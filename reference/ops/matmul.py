"""Matrix products with (quantised) weights. Weights are [out, in]; y = x @ w.T."""

import numpy as np

from reference.numerics import F32, Numerics
from reference.ops.quant import round_activations


def linear(x: np.ndarray, w, num: Numerics = F32) -> np.ndarray:
    """x [T,in], w [out,in] -> [T,out]. Decodes a block of w's rows at a time."""
    x = round_activations(x, w.type, num, w.name)  # [T,in]
    y = np.empty((len(x), w.n_rows), num.acc)
    for first, last in w.row_blocks():
        y[:, first:last] = x @ num.weights(w.rows(first, last)).T
    return num.result(y)


def linear_heads(x: np.ndarray, w, num: Numerics = F32) -> np.ndarray:
    """x [T,H,in], w [H,out,in] -> [T,H,out]: each head has its own matrix. MLA's absorption (k_b) and value decompression (v_b)."""
    x = round_activations(x, w.type, num, w.name)  # [T,H,in]
    n_heads, n_out, _ = w.shape
    y = np.empty((len(x), n_heads, n_out), num.acc)
    for head in range(n_heads):
        y[:, head] = x[:, head] @ num.weights(w.rows(head * n_out, (head + 1) * n_out)).T
    return num.result(y)


def linear_experts(x: np.ndarray, w, experts: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """x [T,in] or [T,K,in], w [E,out,in], experts int32 [T,K] -> [T,K,out]. Decodes the chosen experts only.

    An expert of -1 is not here (npglm/parallel.py): its rows are 0.
    """
    x = round_activations(x, w.type, num, w.name)
    x = np.broadcast_to(x[:, None] if x.ndim == 2 else x, (*experts.shape, x.shape[-1]))  # [T,K,in]
    n_out = w.shape[1]
    y = np.zeros((*experts.shape, n_out), num.acc)
    for expert in np.unique(experts[experts >= 0]):
        chosen = experts == expert  # [T,K]
        rows = x[chosen]  # [n,in]
        out = np.empty((len(rows), n_out), num.acc)
        for first, last in w.row_blocks(int(expert) * n_out, (int(expert) + 1) * n_out):
            out[:, first - expert * n_out : last - expert * n_out] = rows @ num.weights(w.rows(first, last)).T
        y[chosen] = out
    return num.result(y)
