"""Prefill in chunks, the decode loop, and a conversation over one cache. The forward pass and its op set are handed in."""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from npglm.cache import Cache
from npglm.chat import chat_template, render_chat, think_kwargs
from npglm.checkpoint import Checkpoint
from npglm.config import GlmConfig
from npglm.errors import NpglmError
from npglm.sampler import Sampler
from npglm.tokenizer import Tokenizer
from npglm.trace.probes import NO_PROBE

CHUNK = 512  # tokens of a prompt that go through the model together


class Model:
    """A checkpoint with the forward pass and op set that run it. progress(done, total) is told the bytes of weights moved."""

    def __init__(self, checkpoint: Checkpoint, forward, ops, progress=None):
        self.checkpoint, self.config, self.ops, self._forward = checkpoint, checkpoint.config, ops, forward
        self.weights, self._decoder = ops.load(checkpoint, progress), None

    def cache(self, capacity: int) -> Cache:
        return Cache(self.config, capacity, self.ops)

    def run(self, cache: Cache, tokens, probe=NO_PROBE, every_row=False, last_layer=None, chunk: int = CHUNK) -> np.ndarray:
        """Put `tokens` behind what the cache holds, a chunk at a time. Returns logits [1,Y] of the last one.

        every_row: make logits for all rows, which only a probe sees. last_layer: stop after that layer and return its output.
        Raises NpglmError when the cache is full or there are no tokens.
        """
        if not len(tokens):
            raise NpglmError("no tokens to run")
        if cache.length + len(tokens) > cache.capacity:
            raise NpglmError(f"context overflow: {cache.length + len(tokens)} tokens in a cache of {cache.capacity}")
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            final = start + len(part) == len(tokens)
            pos = range(cache.length, cache.length + len(part))
            y = self._forward(
                self.weights,
                self.config,
                cache,
                self.ops.array(part, np.int32),
                self.ops.array(pos, np.int32),
                self.ops,
                probe,
                n_out=None if every_row else 1,
                last_layer=self.config.n_layers - 1 if last_layer is None and not (every_row or final) else last_layer,
            )
            cache.length += len(part)
        return self.ops.numpy(y)[-1:]

    def decoder(self, cache: Cache, sampler: Sampler, vocab: int):
        """The op set's own decode loop over `cache`, which chooses from the first `vocab` ids; None if it cannot as `sampler` does.

        The last one is kept for the next turn of a conversation, unless the cache has moved.
        """
        if sampler.filters or not hasattr(self.ops, "decode"):
            return None
        chooses = {"temperature": sampler.temperature, "seed": sampler.seed, "vocab": vocab}
        last = self._decoder
        if last is None or last.cache is not cache or last.moved or last.chooses != chooses:
            last = self._decoder = None  # gives its memory back first
            self._decoder = self.ops.decode(self._forward, self.weights, self.config, cache, **chooses)
        return self._decoder


def raw_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a raw prompt: BOS only if the checkpoint says so; special tokens in the text are parsed."""
    return [tokenizer.bos_id] * tokenizer.add_bos + tokenizer.encode(text)


def n_chunks(n_tokens: int) -> int:
    return -(-n_tokens // CHUNK)


@dataclass
class Result:
    """ids: generated, an end-of-generation id included. text: without it. logprobs: natural log, one an id. finish: stop|length|interrupt."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str = "length"
    prompt_s: float = 0.0
    decode_s: float = 0.0
    n_cached: int = 0  # of prompt_ids that were in the cache already
    n_prompt: int = 0  # that this call put there

    def figures(self) -> str:
        n_prompt, n_decode = self.n_prompt, max(len(self.ids) - 1, 0)  # prefill makes the first id
        return (
            f"prompt {n_prompt} tokens in {self.prompt_s:.2f} s ({_rate(n_prompt, self.prompt_s)}), "
            f"decode {n_decode} tokens in {self.decode_s:.2f} s ({_rate(n_decode, self.decode_s)})"
        )


def _rate(n: int, seconds: float) -> str:
    return f"{n / seconds:.1f} tok/s" if n and seconds else "- tok/s"


class StopText:
    """Lets text through until one of `stops` occurs; what could still become one is held back."""

    def __init__(self, stops: list[str]):
        self.stops, self.held, self.done = [s for s in stops if s], "", False

    def push(self, text: str) -> str:
        self.held += text
        at = min((i for s in self.stops if (i := self.held.find(s)) >= 0), default=-1)
        if at >= 0:
            self.done = True
            return self._let(at)
        hold = max((n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        return self._let(len(self.held) - hold)

    def flush(self) -> str:
        return "" if self.done else self._let(len(self.held))

    def _let(self, n: int) -> str:
        out, self.held = self.held[:n], self.held[n:]
        return out


def generate(
    model: Model,
    tokenizer: Tokenizer,
    cache: Cache,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    stops: list[str] = (),
    emit=lambda text: None,
    probe=NO_PROBE,
    every_row: bool = False,
    prefilled=lambda: None,
    logprobs: bool = True,
) -> Result:
    """Generate behind `prompt_ids`, of which the first cache.length are in the cache already.

    emit(text) is called as text becomes final, prefilled() once the prompt is in, `probe` sees the prefill only. Without
    logprobs an op set that chooses ids itself need not give its logits away. Ctrl-C ends generation with finish "interrupt". The
    cache then holds the prompt and all generated ids but the last one.
    """
    result = Result(list(prompt_ids), n_cached=cache.length)
    stream, stop = tokenizer.stream(skip_special=True), StopText(stops)

    def let(text: str) -> None:
        result.text += text
        if text:
            emit(text)

    decoder = model.decoder(cache, sampler, tokenizer.vocab_size) if max_tokens > 1 else None
    started = perf_counter()
    decode_started = None
    try:
        logits = model.run(cache, prompt_ids[cache.length :], probe, every_row)[0]  # [Y], of which some rows may have no token
        decode_started = perf_counter()
        result.n_prompt = len(prompt_ids) - result.n_cached
        result.prompt_s = decode_started - started
        prefilled()
        while len(result.ids) < max_tokens:
            n = len(result.ids)
            if decoder and n:
                if n == 1:
                    decoder.start(result.ids[0], cache.length, step=1)
                token = decoder.next()
                logits = model.ops.numpy(decoder.logits)[0] if logprobs else None
            else:
                if n:
                    logits = model.run(cache, result.ids[-1:])[0]
                token = sampler.sample(logits[: tokenizer.vocab_size], step=n)
            result.ids.append(token)
            if logprobs:
                result.logprobs.append(sampler.logprob(logits[: tokenizer.vocab_size], token))
            if token in tokenizer.eog:
                result.finish = "stop"
                break
            let(stop.push(stream.push(token)))
            if stop.done:
                result.finish = "stop"
                break
    except KeyboardInterrupt:
        result.finish = "interrupt"
    if decode_started is None:
        result.prompt_s, result.n_prompt = perf_counter() - started, cache.length - result.n_cached
    else:
        result.decode_s = perf_counter() - decode_started
    if not stop.done:
        let(stop.push(stream.flush()))
        let(stop.flush())
    return result


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many ids at the start of both are the same."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def capacity(config: GlmConfig, n_prompt: int, max_tokens: int, ctx: int | None = None) -> int:
    """Tokens that a cache should hold: ctx, or the prompt and max_tokens, at most the model's context. NpglmError on overflow."""
    limit = config.context_length
    if ctx is not None and not 1 <= ctx <= limit:
        raise NpglmError(f"a context of {ctx} tokens was asked for (--ctx), expected 1 to the model's {limit}")
    size = min(ctx or n_prompt + max_tokens, limit)
    if n_prompt + 1 > size:
        raise NpglmError(f"context overflow: a prompt of {n_prompt} tokens leaves no room in a context of {size}")
    return size


class Conversation:
    """A chat over one cache that doubles as it fills: `ids = c.prompt_ids(text)`, generate over `c.cache_for(ids, n)`, `c.answered(result)`."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, system: str | None = None, think: bool | None = None, ctx: int | None = None
    ):
        """think: None leaves it to the template. ctx: a fixed context. NpglmError when the checkpoint has no chat template."""
        self.model, self.tokenizer, self.think, self.ctx = model, tokenizer, think, ctx
        self.template = chat_template(model.checkpoint.metadata, model.checkpoint.path.name)
        self.messages = [{"role": "system", "content": system}] if system is not None else []
        self.cache, self.ids = None, []  # ids: what the cache holds, and the last generated one

    def prompt_ids(self, text: str) -> list[int]:
        """Add a user's message; the whole conversation so far in token ids."""
        self.messages.append({"role": "user", "content": text})
        return self.tokenizer.encode(render_chat(self.template, self.messages, **think_kwargs(self.think)))

    def cache_for(self, ids: list[int], max_tokens: int) -> Cache:
        """The cache, cut back to what it shares with `ids` and grown until it holds them and an answer. NpglmError on overflow."""
        need = capacity(self.model.config, len(ids), max_tokens, self.ctx)
        if self.cache is None:
            self.cache = self.model.cache(need)
        self.cache.length = min(common_prefix(self.ids, ids), len(ids) - 1, self.cache.length)
        if need > self.cache.capacity:
            self.cache.grow(min(max(need, 2 * self.cache.capacity), self.model.config.context_length))
        return self.cache

    def answered(self, result: Result) -> None:
        self.ids = result.prompt_ids + result.ids
        self.messages.append({"role": "assistant", "content": result.text})
