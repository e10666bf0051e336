#!/usr/bin/env python
"""Say what a GLM-5 checkpoint is, what running it takes, and what this build cannot run. Reads headers only, unless --check."""

import argparse
import json
import sys
from pathlib import Path

from backend import BACKENDS, pick
from rich.console import Console
from rich.progress import Progress

from npglm import cli
from npglm.checkpoint import read_gguf, shard_paths
from npglm.cpu.threads import physical_cores
from npglm.describe import check, describe, page
from npglm.errors import NpglmError


def parse(argv):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("model", help="GGUF file, any shard, or a folder")
    parser.add_argument(
        "--check", action="store_true", help="read every tensor and name those with NaN or inf; status 1 if there are any"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    parser.add_argument(
        "--ctx", type=int, metavar="N", help="tokens in the cache (default: 4096, or the model's context if less)"
    )
    parser.add_argument("--memory", type=float, metavar="GB", help="of the GPU that it may run on (default: the one seen here)")
    parser.add_argument("--ranks", type=int, metavar="N", help="say what each of N ranks (mpirun -n N) would hold")
    args = parser.parse_args(argv)
    if args.ranks is not None and not 2 <= args.ranks <= 1024:
        parser.error(f"--ranks is {args.ranks}, expected 2 to 1024")
    if args.memory is not None and not 0 < args.memory < 1e6:
        parser.error(f"--memory is {args.memory}, expected GB > 0")
    if args.ctx is not None and not 1 <= args.ctx <= 1 << 31:
        parser.error(f"--ctx is {args.ctx}, expected 1 to {1 << 31}")
    return args


def backends() -> tuple[list[str], list[str], tuple[str, int] | None]:
    """(those that run here, why the others do not, name and bytes of the GPU)."""
    runs, cannot, gpu = [], [], None
    defaults = {"numerics": None, "threads": None, "weight_cache": 0.0, "offload_experts": False}
    for name in BACKENDS[1:]:
        try:
            _, ops = pick(argparse.Namespace(backend=name, **defaults))
        except (NpglmError, ImportError) as error:
            cannot.append(str(error))
            continue
        on = {"cpu": lambda ops: f"tier {ops.tier}, {physical_cores()} cores", "gpu": lambda ops: ops.device.name}.get(name)
        runs.append(f"{name}: {on(ops)}" if on else name)
        if name == "gpu":
            gpu = ops.device.name, ops.device.free_bytes()[1]
    return runs, cannot, gpu


def main(argv=None) -> int:
    args = parse(argv)
    runs, cannot, gpu = backends()
    if args.memory:
        gpu = "", int(args.memory * 1e9)
    facts = describe(args.model, args.ctx, gpu, args.ranks)
    facts["runs"] = runs
    facts["cannot"] += cannot
    if not args.json:
        print(page(facts), end="", flush=True)
    bad = []
    if args.check:
        tensors = [t for path in shard_paths(Path(args.model)) for t in read_gguf(path).tensors.values()]
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("check", total=sum(t.nbytes for t in tensors))
            bad = list(check(tensors, lambda n_bytes: bar.advance(task, n_bytes)))
        facts["check"] = {"tensors": len(tensors), "bad": bad}
        if not args.json:
            print("\nCheck")
            for b in bad:
                print(
                    f"  {b['tensor']} ({b['type']}, {b['file']}): "
                    f"{b['nan']} NaN, {b['inf']} inf in {b['rows']} rows from {b['first_row']}"
                )
            print(f"  {len(bad) or 'none'} of {len(tensors)} tensors with NaN or inf")
    if args.json:
        print(json.dumps(facts))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
