"""The training run: dense attention first, then the indexer's choice, then that on rounded weights."""

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from . import model as tiny
from .corpus import say

# Of the run: dense attention while the indexer learns to imitate it; from there on sparse; from there on rounded.
SPARSE_FROM, ROUNDED_FROM = 0.35, 0.65
PEAK_RATE, LAST_RATE, WARM_UP = 2.5e-3, 0.02, 60
WEIGHT_DECAY, DROPOUT, CLIP = 0.1, 0.1, 1.0
BALANCE_RATE = 1e-3


class Batches(torch.utils.data.Dataset):
    """The batch of each step: prose windows, and rows packed with whole synthetic documents."""

    def __init__(self, corpus: dict[str, np.ndarray], seed: int, tokens_per_batch: int):
        self.corpus, self.seed, self.tokens_per_batch = corpus, seed, tokens_per_batch

    def prose(self, rng: random.Random, length: int) -> np.ndarray:
        start = rng.randrange(len(self.corpus["prose"]) - length)
        return self.corpus["prose"][start : start + length]

    def document(self, rng: random.Random, kind: str) -> np.ndarray:
        offsets = self.corpus[f"{kind}_offsets"]
        at = rng.randrange(len(offsets) - 1)
        return self.corpus[kind][offsets[at] : offsets[at + 1]]

    def packed(self, rng: random.Random, length: int) -> np.ndarray:
        parts = [self.document(rng, "recall_long")] if length > 256 and rng.random() < 0.6 else []
        filled = sum(map(len, parts))
        while filled < length:
            draw = rng.random()
            part = self.document(rng, "facts" if draw < 0.74 else "chat" if draw < 0.94 else "recall")
            if filled + len(part) <= length or length - filled < 24:
                parts.append(part)
                filled += len(part)
        return np.concatenate(parts)[:length]

    def __getitem__(self, step: int) -> torch.Tensor:
        rng = random.Random(self.seed * 1_000_003 + step)
        length = 2048 if step % 20 == 19 else 1024 if step % 10 == 4 else 256
        rows = max(1, self.tokens_per_batch // length)
        share = 0.42 if length == 256 else 0.6  # of prose
        batch = [self.prose(rng, length) if rng.random() < share else self.packed(rng, length) for _ in range(rows)]
        return torch.from_numpy(np.stack(batch).astype(np.int64))


def learning_rate(step: int, steps: int) -> float:
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@torch.no_grad()
def held_out_loss(model, corpus: dict[str, np.ndarray], device: str, length: int = 1024) -> float:
    """A quick look at the held-out prose: nats per token over its first windows."""
    model.eval()
    count = min(32, len(corpus["held_out"]) // length)
    rows = torch.from_numpy(corpus["held_out"][: count * length].astype(np.int64)).view(count, length).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(rows, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten()).item()
    model.train()
    return loss


def parameter_groups(model) -> Iterator[dict]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    yield {"params": matrices, "weight_decay": WEIGHT_DECAY}
    yield {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}


def train(work: Path, vocab_size: int, end_id: int, steps: int, seed: int, device: str, batch: int) -> dict[str, torch.Tensor]:
    """The trained weights, unrounded."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    corpus = dict(np.load(work / "corpus.npz"))
    batches = torch.utils.data.DataLoader(
        Batches(corpus, seed, batch), batch_size=None, sampler=range(steps), num_workers=4, prefetch_factor=8
    )
    model = tiny.make_model(vocab_size, end_id).to(device).train()
    state = tiny.prepare_for_training(model)
    state.dropout, state.learn_indexer = DROPOUT, True
    switches = tiny.add_rounding(model, torch.bfloat16 if device == "cuda" else torch.float32)
    indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    others = [p for name, p in model.named_parameters() if ".indexer." not in name]
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=device == "cuda")
    say(f"{sum(p.numel() for p in model.parameters())} parameters, {steps} steps of {batch} tokens on {device}")

    started, seen = time.monotonic(), 0
    for step, rows in enumerate(batches):
        state.select = "dense" if step < SPARSE_FROM * steps else "indexer"
        if step == math.ceil(ROUNDED_FROM * steps):
            for switch in switches:
                switch.active = True
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        rows = rows.to(device, non_blocking=True)
        state.losses.clear()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(rows, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        indexer_loss = torch.stack(state.losses).sum()
        (loss + indexer_loss).backward()
        torch.nn.utils.clip_grad_norm_(others, CLIP)
        torch.nn.utils.clip_grad_norm_(indexer, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not switches[0].active:  # the experts that a token gets must settle before the end
            tiny.balance_experts(model, BALANCE_RATE)
        seen += rows.numel()
        if step % 100 == 0 or step == steps - 1:
            took = time.monotonic() - started
            phase = "rounded" if switches[0].active else state.select
            say(
                f"step {step:5} {phase:8} loss {loss.item():.3f} indexer {indexer_loss.item():.3f} {took:5.0f} s "
                f"{seen / took:.0f} tokens/s"
            )
        if step % 1000 == 999 or step == steps - 1:
            state.learn_indexer = False
            say(f"step {step:5} held-out prose {held_out_loss(model, corpus, device):.3f} nats per token")
            state.learn_indexer = True
    return tiny.plain_state(model)
