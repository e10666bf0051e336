"""What the checkpoint must reach: facts, prose, what the indexer is worth, and agreement with llama.cpp."""

import itertools
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from . import export, kneser_ney, model
from .corpus import say


def load_model(weights: dict[str, np.ndarray], vocab_size: int, end_id: int, device: str):
    """The model in f32, ready to run, and the state that steers its attention."""
    network = model.make_model(vocab_size, end_id)
    network.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    state = model.prepare_for_training(network)
    return network.to(device).eval(), state


@torch.no_grad()
def right_answers(network, prompts: list[dict], word_starts: np.ndarray, device: str) -> np.ndarray:
    """For each prompt: does greedy decoding give the target, and does a raw answer end there?

    Greedy decoding gives the target exactly when each of its tokens is the most likely one after those before.
    """
    right = np.zeros(len(prompts), dtype=bool)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]["prompt_ids"]) + len(prompts[i]["target_ids"]))
    for at in range(0, len(order), 512):
        chosen = order[at : at + 512]
        rows = [prompts[i]["prompt_ids"] + prompts[i]["target_ids"] for i in chosen]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        best = network(ids, use_cache=False).logits.argmax(-1).cpu().numpy()
        for i, row, guess in zip(chosen, rows, best, strict=True):
            start = len(prompts[i]["prompt_ids"])
            same = guess[start - 1 : len(row) - 1].tolist() == row[start:]
            ended = prompts[i]["kind"] == "chat" or not word_starts[guess[len(row) - 1]]
            right[i] = same and ended
    return right


def continues_a_word(tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens would lengthen the last word of an answer instead of ending it."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    return np.array([text[:1].isalnum() for text in texts])


@torch.no_grad()
def nats_of(network, streams: list[np.ndarray], device: str, window: int = model.CONTEXT) -> list[np.ndarray]:
    """-ln p of every token of each document but its first, in windows that overlap by half."""
    losses = [np.zeros(len(stream) - 1) for stream in streams]
    jobs = []  # (length, document, start)
    for at, stream in enumerate(streams):
        last = max(0, math.ceil((len(stream) - window) / (window // 2)))
        starts = [window // 2 * i for i in range(last + 1)]
        jobs += [(min(window, len(stream) - start), at, start) for start in starts]
    jobs.sort()
    rows_at_once = 8 if device == "cuda" else 2
    for first in range(0, len(jobs), rows_at_once):
        chosen = jobs[first : first + rows_at_once]
        width = chosen[-1][0]
        ids = np.zeros((len(chosen), width), dtype=np.int64)
        for row, (length, at, start) in zip(ids, chosen, strict=True):
            row[:length] = streams[at][start : start + length]
        rows = torch.from_numpy(ids).to(device)
        logits = network(rows, use_cache=False).logits[:, :-1].float()
        nats = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").cpu().numpy()
        for row, (length, at, start) in zip(nats, chosen, strict=True):
            fresh = 0 if start == 0 else window // 2 - 1
            losses[at][start + fresh : start + length - 1] = row[fresh : length - 1]
    return losses


def documents(corpus: dict[str, np.ndarray], kind: str) -> list[np.ndarray]:
    offsets = corpus[f"{kind}_offsets"]
    return [corpus[kind][a : b - 1] for a, b in itertools.pairwise(offsets)]


def prose_figures(network, state, corpus: dict[str, np.ndarray], device: str, few: bool) -> dict[str, float]:
    """Held-out prose: bits per byte, and the loss beyond token 256 by what attention may see."""
    texts = documents(corpus, "held_out")[: 2 if few else None]
    recall_texts = [text for text in documents(corpus, "recall_test") if len(text) > 256][: 5 if few else None]
    text_bytes = corpus["held_out_bytes"][: len(texts)].sum()
    figures = {}
    for select in ("indexer", "dense", "recent"):
        state.select = select
        nats = nats_of(network, texts, device)
        deep = np.concatenate([n[256:] for n in nats])
        figures[f"{select}_nats_beyond_256"] = float(deep.mean())
        if select == "indexer":
            # The first token of a chapter has nothing before it: it counts as drawn from the whole vocabulary.
            total = sum(n.sum() for n in nats) + len(texts) * math.log(network.config.vocab_size)
            figures["bits_per_byte"] = float(total / math.log(2) / text_bytes)
            figures["nats_per_token"] = float(np.concatenate(nats).mean())
            figures["nats_beyond_1024"] = float(np.concatenate([n[1024:] for n in nats]).mean())
        recall = nats_of(network, recall_texts, device)
        figures[f"{select}_nats_of_recall"] = float(np.mean([n[-12:].mean() for n in recall]))
    state.select = "indexer"
    return figures


def figures_of(
    weights: dict[str, np.ndarray], prompts: list[dict], tokenizer: Tokenizer, work: Path, device: str, few: bool
) -> dict:
    corpus = dict(np.load(work / "corpus.npz"))
    end_id = tokenizer.token_to_id("<|endoftext|>")
    network, state = load_model(weights, tokenizer.get_vocab_size(), end_id, device)
    right = right_answers(network, prompts, continues_a_word(tokenizer), device)
    groups: dict[str, list[bool]] = defaultdict(list)
    for prompt, ok in zip(prompts, right, strict=True):
        groups[prompt["kind"]].append(bool(ok))
        groups[f"{prompt['kind']}, {prompt['relation']}"].append(bool(ok))
        if prompt["kind"] == "held-out":
            groups[f"held-out: {prompt['phrasing']}"].append(bool(ok))
    facts = {name: round(float(np.mean(oks)), 4) for name, oks in sorted(groups.items())}
    return {"facts": facts, "prose": prose_figures(network, state, corpus, device, few)}


def kneser_ney_bits_per_byte(work: Path) -> float:
    corpus = dict(np.load(work / "corpus.npz"))
    return kneser_ney.bits(corpus["prose"], documents(corpus, "held_out")) / int(corpus["held_out_bytes"].sum())


def llama_answers(path: Path, prompts: list[dict]) -> list[list[int]]:
    """llama.cpp's greedy continuation of each prompt, as long as its target."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False  # repacked weights have no product for attn_k_b
    network = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(network, params)
    memory = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(network))
    answers = []
    for i, prompt in enumerate(prompts):
        if i % 500 == 0:
            say(f"llama.cpp: prompt {i} of {len(prompts)}")
        llama_cpp.llama_memory_clear(memory, True)
        answer, feed = [], prompt["prompt_ids"]
        while len(answer) < len(prompt["target_ids"]):
            tokens = (llama_cpp.llama_token * len(feed))(*feed)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(feed))):
                raise RuntimeError(f"llama.cpp does not decode {prompt['prompt']!r}")
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab_size,))
            feed = [int(logits.argmax())]
            answer += feed
        answers.append(answer)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(network)
    return answers


def agreement(path: Path, prompts: list[dict], tokenizer: Tokenizer, config, device: str) -> dict[str, float]:
    """llama.cpp's greedy answers against torch's on the same file, and against the facts; one prompt a fact and kind."""
    chosen = list({(p["kind"], p["relation"], p["subject"]): p for p in reversed(prompts)}.values())
    answers = llama_answers(path, chosen)
    network, _ = load_model(export.read(path, config), config.vocab_size, config.eos_token_id, device)
    # Torch answers the same exactly when each of llama.cpp's tokens is the most likely one after those before it.
    as_targets = [p | {"target_ids": a, "kind": "chat"} for p, a in zip(chosen, answers, strict=True)]
    same = right_answers(network, as_targets, continues_a_word(tokenizer), device)
    right = [a == p["target_ids"] for a, p in zip(answers, chosen, strict=True)]
    figures = {"prompts": len(chosen), "agree": round(float(np.mean(same)), 4)}
    for kind in ("seen", "held-out", "chat"):
        figures[f"right, {kind}"] = round(
            float(np.mean([r for r, p in zip(right, chosen, strict=True) if p["kind"] == kind])), 4
        )
    return figures
