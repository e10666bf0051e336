"""Q2_K rounding in torch: ggml's reference quantiser (quantize_row_q2_K_ref), vectorised, for quantisation-aware steps.

A super-block of 256 values holds 16 sub-blocks of 16; each has a 4-bit scale and a 4-bit minimum in units of two
f16 numbers of the super-block. A value is (d * scale) * q - (dmin * minimum), q in 0..3.
"""

import torch


def best_scale_and_minimum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ggml's make_qkx2_quants with |x| as weights: tries 17 scales, keeps the least weighted absolute error.

    As in ggml, a better minimum is at once the base of the scales tried after it.
    """
    weight = x.abs()
    high, minimum = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).clamp(max=0)
    flat = high == minimum
    high = torch.where(flat, minimum + 1.0, high)
    sum_w, sum_x = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)

    scale = 1 / (3 / (high - minimum))
    q = ((x - minimum) * (3 / (high - minimum))).round().clamp(0, 3)
    error = (weight * (scale * q + minimum - x).abs()).sum(-1, keepdim=True)
    for step in range(16):
        q = ((x - minimum) * ((2.5 + 0.1 * step) / (high - minimum))).round().clamp(0, 3)
        wq = weight * q
        sum_l, sum_l2, sum_xl = (t.sum(-1, keepdim=True) for t in (wq, wq * q, wq * x))
        divisor = sum_w * sum_l2 - sum_l * sum_l
        safe = torch.where(divisor > 0, divisor, 1.0)
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / safe
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / safe
        above = new_minimum > 0
        new_scale = torch.where(above, sum_xl / torch.where(sum_l2 > 0, sum_l2, 1.0), new_scale)
        new_minimum = torch.where(above, 0.0, new_minimum)
        new_error = (weight * (new_scale * q + new_minimum - x).abs()).sum(-1, keepdim=True)
        better = (divisor > 0) & (new_error < error)
        scale, minimum, error = (
            torch.where(better, new, old) for new, old in ((new_scale, scale), (new_minimum, minimum), (new_error, error))
        )
    return torch.where(flat, 0.0, scale), -minimum


def in_sixteenths(values: torch.Tensor) -> torch.Tensor:
    """16 scales (or minima) of a super-block as 4-bit numbers times one f16."""
    largest = values.amax(-2, keepdim=True).clamp(min=0)
    unit = (largest / 15).half().float()
    steps = (values * (15 / torch.where(largest > 0, largest, 1.0))).round().clamp(0, 15)
    return steps * unit


@torch.no_grad()
def grid_q2_k(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and the minimum of every sub-block of x, as Q2_K stores them; the last axis is a multiple of 256."""
    scale, minimum = best_scale_and_minimum(x.float().reshape(-1, 16, 16))
    return in_sixteenths(scale), in_sixteenths(minimum)


@torch.no_grad()
def round_to_grid(x: torch.Tensor, step: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    q = ((x.float().reshape(-1, 16, 16) + minimum) / torch.where(step == 0, 1.0, step)).round().clamp(0, 3)
    return (step * q - minimum).reshape(x.shape)
