#!/usr/bin/env python
"""Makes the embedded checkpoint: gathers data, trains, exports and checks, all from one seed.

    python scripts/train_tiny.py

needs the extras [train] and [oracle], and npm and Debian's apt-get for the data; minutes on a GPU, a day on a CPU.
The phases leave their results in the work folder, so that each can run on the machine that has what it needs.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from npglm import cli
from npglm.errors import NpglmError

PHASES = ("data", "train", "export", "check", "llama")


def parse_arguments(argv) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--phase", choices=PHASES, action="append", help="run this phase only (may be repeated)")
    parser.add_argument("--work", type=Path, default=Path(".train"), help="folder for everything in between")
    parser.add_argument("--out", type=Path, default=Path("npglm/data/tiny-glm.Q2_K.gguf"), help="the checkpoint")
    parser.add_argument("--steps", type=int, default=930)
    parser.add_argument("--batch", type=int, default=24576, metavar="TOKENS", help="tokens of one step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--ggml", type=Path, help="libggml-base.so to quantise with; default: llama-cpp-python's")
    parser.add_argument("--smoke", action="store_true", help="3 steps, little data, few prompts: do all phases work?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.batch, args.out = 3, 256, args.work / "smoke.gguf"
    return args


def missed_bars(report: dict) -> list[str]:
    """The bars that the quantised checkpoint does not reach; `report` has been through the check phase."""
    facts, prose, kneser_ney = report["after"]["facts"], report["after"]["prose"], report["kneser_ney_bits_per_byte"]
    sparse, dense, recent = (prose[f"{how}_nats_beyond_256"] for how in ("indexer", "dense", "recent"))
    bars = {
        "facts in seen phrasings >= 95 %": facts["seen"] >= 0.95,
        "facts in held-out phrasings >= 85 %": facts["held-out"] >= 0.85,
        "facts in chat form >= 95 %": facts["chat"] >= 0.95,
        "held-out prose below Kneser-Ney's bits per byte": prose["bits_per_byte"] < kneser_ney,
        "dense attention lowers the loss beyond token 256 by at most 2 %": dense >= 0.98 * sparse,
        "the last 32 tokens raise the loss beyond token 256 by 0.05 nats": recent >= sparse + 0.05,
    }
    return [bar for bar, met in bars.items() if not met]


def main(argv=None) -> int:
    args = parse_arguments(argv)
    phases = args.phase or PHASES
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with this
    try:
        import torch
        from safetensors.numpy import load_file, save_file
        from tiny import checks, corpus, export, model, training
        from tokenizers import Tokenizer
    except ImportError as error:
        raise NpglmError(f"{error.name} is not installed: pip install -e '.[train,oracle]'") from None

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report_path = args.work / "report.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}

    if "data" in phases:
        corpus.build(args.work, args.seed, scale=0.02 if args.smoke else 1.0)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    prompts = json.loads((args.work / "prompts.json").read_text())
    if args.smoke:
        prompts = prompts[:: len(prompts) // 60]
    end_id = tokenizer.token_to_id(corpus.END)
    config = model.make_config(tokenizer.get_vocab_size(), end_id)
    weights_path = args.work / "weights.safetensors"

    if "train" in phases:
        trained = training.train(args.work, config.vocab_size, end_id, args.steps, args.seed, device, args.batch)
        save_file({name: value.numpy() for name, value in trained.items()}, weights_path)
        report = {"steps": args.steps, "batch": args.batch, "seed": args.seed, "torch": torch.__version__}
    if "export" in phases:
        export.write(args.out, load_file(weights_path), tokenizer, end_id, args.ggml)
        corpus.say(f"{args.out}: {args.out.stat().st_size} bytes")
    if "check" in phases:
        report["kneser_ney_bits_per_byte"] = checks.kneser_ney_bits_per_byte(args.work)
        files = {"after": export.read(args.out, config)}
        if weights_path.exists():
            files["before"] = load_file(weights_path)
        for when, weights in files.items():
            report[when] = checks.figures_of(weights, prompts, tokenizer, args.work, device, args.smoke)
            corpus.say(f"{when} quantisation: {json.dumps(report[when], indent=1)}")
    if "llama" in phases:
        report["llama.cpp"] = checks.agreement(args.out, prompts, tokenizer, config, device)
    report_path.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    missed = missed_bars(report) if "check" in phases and not args.smoke else []
    for bar in missed:
        print(f"missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
