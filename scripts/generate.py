#!/usr/bin/env python
"""Generate text with a GLM-5 checkpoint. stdout holds the text only (or one JSON object); everything else goes to stderr."""

import contextlib
import json
import resource
import sys

import numpy as np
from backend import add_arguments, add_rank_arguments, open_model

import npglm
from npglm import cli
from npglm.errors import NpglmError
from npglm.generate import Conversation, capacity, generate, n_chunks, raw_prompt
from npglm.progress import LayerProgress
from npglm.sampler import Sampler
from npglm.tokenizer import Tokenizer
from npglm.trace.record import recorder


def parse(argv):
    parser = cli.Parser(description=__doc__)
    parser.add_argument(
        "prompt", nargs="?", help="text; BOS is added only if the checkpoint says so; special tokens are parsed"
    )
    parser.add_argument(
        "--model", "-m", help="GGUF file, any shard, or a folder (default: the small one that comes with npglm)"
    )
    parser.add_argument("--tokens", type=cli.token_ids, metavar="1,2,3", help="token ids instead of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of the answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: off")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ctx", type=int, metavar="N", help="cache size in tokens (default: prompt + --max-tokens)")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template, one turn")
    parser.add_argument("-i", "--interactive", action="store_true", help="chat line by line until end of input")
    parser.add_argument("--system", metavar="TEXT", help="system message of a chat")
    parser.add_argument(
        "--think", action=cli.argparse.BooleanOptionalAction, help="let a chat think (default: as the template does)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--trace", metavar="OUT.safetensors", help="record the prompt's prefill")
    add_arguments(parser)
    add_rank_arguments(parser)
    args = parser.parse_args(argv)
    if args.max_tokens < 1:
        parser.error(f"--max-tokens is {args.max_tokens}, expected at least 1")
    if args.interactive and args.tokens is not None:
        parser.error("-i takes no --tokens")
    if (args.prompt is not None) + (args.tokens is not None) != 1 and not args.interactive:
        parser.error("expected either a prompt or --tokens")
    if args.tokens is not None and args.chat:
        parser.error("--chat takes a prompt, not --tokens")
    if args.interactive and (args.json or args.trace):
        parser.error("-i goes with neither --json nor --trace")
    if not (args.chat or args.interactive) and (args.system is not None or args.think is not None):
        parser.error("--system and --think/--no-think need --chat or -i")
    return args


def note(text: str) -> None:
    print(text, file=sys.stderr)


def emit(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(argv=None, ranks=None):
    args = parse(argv)
    if ranks:
        ranks.agree(cli.options(args))
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    checkpoint = npglm.load(npglm.embedded() if args.model is None else args.model)
    tokenizer = Tokenizer.from_metadata(checkpoint.metadata, checkpoint.path.name)
    if tokenizer.vocab_size > checkpoint.config.vocab:
        raise NpglmError(
            f"{checkpoint.path.name}: {tokenizer.vocab_size} tokens, but the model has {checkpoint.config.vocab} rows"
        )
    for text in checkpoint.notes():
        note(f"note: {text}")
    model = open_model(args, checkpoint, ranks, traced=bool(args.trace))
    ops = model.ops
    chat = Conversation(model, tokenizer, args.system, args.think, args.ctx) if args.chat or args.interactive else None

    def answer(ids: list[int]):
        model.config.check_tokens(ids)
        cache = (
            chat.cache_for(ids, args.max_tokens)
            if chat
            else model.cache(capacity(model.config, len(ids), args.max_tokens, args.ctx))
        )
        result = record = None
        try:
            with contextlib.ExitStack() as stack:
                progress = stack.enter_context(LayerProgress(model.config.n_layers, n_chunks(len(ids) - cache.length)))
                if args.trace is not None:
                    dtype = np.float64 if ops.numerics.name == "f64" else np.float32
                    out = ranks.path(args.trace) if ranks else args.trace
                    file = stack.enter_context(cli.whole_file(out, checkpoint.paths))
                    record = recorder(file, model.checkpoint, ids, ops.numerics.name, dtype=dtype)

                def prefilled():
                    if record:
                        record.finish()
                    stack.close()  # the bar goes, the trace takes its name

                result = generate(
                    model,
                    tokenizer,
                    cache,
                    ids,
                    sampler,
                    min(args.max_tokens, cache.capacity - len(ids)),
                    args.stop,
                    emit=(lambda text: None) if args.json else emit,
                    probe=progress.over(record) if record else progress.over(),
                    every_row=bool(record),
                    prefilled=prefilled,
                    logprobs=args.json,
                )
                if result.finish == "interrupt" and (ranks or (record and not record.complete)):
                    raise KeyboardInterrupt  # so that no half of a trace is kept, and no rank waits for this one
        except KeyboardInterrupt:
            if result is None or ranks:
                raise
        if chat:
            chat.answered(result)
        if not args.json:
            emit("\n" if result.text and not result.text.endswith("\n") else "")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        note(f"{result.figures()}, backend {ops.backend} {ops.numerics.name}, peak memory {peak:.0f} MiB")
        return result

    if args.interactive:
        return talk(args, chat, answer, ranks)
    result = answer(args.tokens or (chat.prompt_ids(args.prompt) if chat else raw_prompt(tokenizer, args.prompt or "")))
    if args.json:
        print(json.dumps(as_json(result, ops.backend), ensure_ascii=False))
    return 130 if result.finish == "interrupt" else 0


def as_json(result, backend: str) -> dict:
    return {
        "prompt_ids": result.prompt_ids,
        "ids": result.ids,
        "text": result.text,
        "logprobs": result.logprobs,
        "finish": result.finish,
        "timings": {"prompt_s": result.prompt_s, "decode_s": result.decode_s},
        "backend": backend,
    }


def talk(args, chat, answer, ranks) -> int:
    """Read a line, answer it, until the input ends. mpirun gives the input to rank 0."""
    line = args.prompt
    while True:
        if line is None:
            sys.stderr.write("> ")
            sys.stderr.flush()
            line = sys.stdin.readline() if ranks is None or ranks.rank == 0 else None
            line = ranks.share(line) if ranks else line
            if not line:
                note("")
                return 0
        if line.strip() and answer(chat.prompt_ids(line.rstrip("\n"))).finish == "interrupt":
            return 130
        line = None


if __name__ == "__main__":
    sys.exit(cli.run(main, ranks=True))
