"""Benchmark of several GPUs that share one model: `mpirun -n 2 python scripts/bench.py --backend gpu --layers 78`. Random weights
are made on the devices, each rank's own part. Decode is measured as graph replay, beside the same model on one GPU alone.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import npglm.forward
from npglm.checkpoint import MODEL_TENSORS, Tensor, layer_tensors
from npglm.describe import per_token
from npglm.gpu import op_set
from npglm.gpu.bench import REPLAYS, SHAPES, Random, Timer, cut, kind_of, make_cache
from npglm.gpu.collective import Collective
from npglm.parallel import RankOps, Sharding

ALONE = 36  # layers that one GPU holds by itself
CONTEXTS = (0, 4096)


def outline(config) -> SimpleNamespace:
    """What a checkpoint of this shape says of itself, without its bytes: what Sharding and per_token ask for."""

    def tensor(attribute, axes):
        shape, kind = tuple(config.axes[a] for a in axes.split()), GGMLQuantizationType[kind_of(attribute, axes).upper()]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = int(np.prod(shape[:-1])), shape[-1] // block * block_bytes
        return Tensor(attribute, shape, kind, np.broadcast_to(np.uint8(0), size))

    def part(table):
        return SimpleNamespace(**{a: tensor(a, axes) for a, (_, axes, _) in table.items()})

    weights = part(MODEL_TENSORS)
    weights.layers = [part(layer_tensors(config, i)) for i in range(config.n_layers)]
    return SimpleNamespace(config=config, weights=weights, path=Path(config.name))


class Kept:
    """An op set, some of whose verbs run the first time only and then give the same arrays again: what a step takes without them."""

    def __init__(self, ops, verbs=()):
        self.ops, self.verbs, self.results, self.called, self.at = ops, verbs, [], {}, None

    def __getattr__(self, name):
        value = getattr(self.ops, name)
        if name == "decode":
            return value.__func__.__get__(self)
        if name == "repeat":
            return self._repeat
        if not callable(value) or name in (
            "cache_dtype",
            "empty",
            "array",
            "numpy",
            "launch",
            "sample",
            "remember",
            "constant",
        ):
            return value
        self.called[name] = True
        return (
            (lambda *a, **k: self._keep(value(*a, **k)) if self.at is None else self._next()) if name in self.verbs else value
        )

    def _keep(self, result):
        self.results.append(result)
        return result

    def _next(self):
        self.at += 1
        return self.results[self.at - 1]

    def _repeat(self, function):
        def twice():
            result = function()
            self.at = 0  # from here on nothing is made again
            return result

        return self.ops.repeat(twice)


def bench(ranks, shape: str = "glm-5.2", layers: int = 78, say=print) -> dict:
    """Print the tables on rank 0; returns every figure. Called by all ranks together."""
    ops, whole = op_set("ggml", "gpu", index=ranks.local_rank), SHAPES[shape]
    config, forward, timer = cut(whole, layers), npglm.forward.forward, Timer(ops)
    pool = ops.device.cupy.get_default_memory_pool()
    bandwidths = ranks.gather(timer.copy_gbs())
    pool.free_all_blocks()
    say(f"{ranks.world} x {ops.device.name}: copy " + ", ".join(f"{b:.0f}" for b in bandwidths) + " GB/s (read + written)")
    figures = {"device": ops.device.name, "ranks": ranks.world, "layers": layers, "copy_gbs": bandwidths}
    random = Random(ops)

    def decode(ops, config, weights, context, replays=REPLAYS):
        """(ms a token, bytes of the last logits)"""
        cache = make_cache(ops, config, context + 2 * replays)
        decoder = ops.decode(forward, weights, config, cache)
        decoder.start(5, context)
        ms = timer.ms(decoder.repeat, replays)
        logits = ops.numpy(decoder.repeat()[0]).tobytes()
        del decoder, cache
        pool.free_all_blocks()
        return ms, logits

    collective = Collective(ops, ranks)
    figures["sum_us"] = sums(ops, collective, config.hidden, timer)
    say(
        f"sum of {config.hidden} values over the ranks: " + ", ".join(f"{k} {us:.1f} us" for k, us in figures["sum_us"].items())
    )

    # one rank alone
    n_alone, alone = min(ALONE, layers), {}
    if ranks.rank == 0:
        few = cut(whole, n_alone)
        weights = random.model(few)
        alone = {context: decode(ops, few, weights, context)[0] for context in CONTEXTS}
        del weights
        pool.free_all_blocks()
    alone = figures["alone_ms"] = ranks.share(alone)

    # all ranks
    sharding = Sharding(outline(config), ranks.world, "tensor")
    mine = sharding.config(config, ranks.rank)
    weights = random.model(mine)
    _, start, stop = sharding.bounds("output", ranks.rank)
    weights.output = random.weight("output", "q8_0", (stop - start, config.hidden))
    shared = RankOps(ops, collective, config, sharding, ranks.rank)
    shared.over(weights)
    free, total = ops.device.free_bytes()
    say(f"{layers} layers, {(total - free) / 2**30:.1f} GiB of each GPU's {total / 2**30:.1f} in use")
    few, first = cut(mine, n_alone), SimpleNamespace(**{**vars(weights), "layers": weights.layers[:n_alone]})
    say(f"\ndecode, graph replay, median of {REPLAYS}")
    say(
        f"{'context':>8} {'ms':>7} {'tok/s':>7} {'roofline':>9} {'of it':>6} {'sums':>6}   {n_alone} layers: one rank, {ranks.world} ranks, efficiency"
    )
    for context in CONTEXTS:
        ms, logits = decode(shared, mine, weights, context)
        same = len(set(ranks.gather(logits))) == 1 and decode(shared, mine, weights, context)[1] == logits
        quiet = RankOps(ops, SimpleNamespace(sum=lambda x: x, adds_norm=lambda y: False), config, sharding, ranks.rank)
        quiet.over(weights)
        without = decode(quiet, mine, weights, context)[0]
        part = decode(shared, few, first, context)[0]
        read = per_token(outline(config), context)
        n_bytes = read["weights_total"] + read["latent_kv"] + read["indexer_keys"]
        roofline = sum(bandwidths) * 1e9 / n_bytes
        efficiency = alone[context] / (ranks.world * part)
        figures[f"decode @{context}"] = {
            "ms": ms, "tok_s": 1e3 / ms, "bytes": n_bytes, "roofline_tok_s": roofline, "share": 1e3 / ms / roofline,
            "sums_share": 1 - without / ms, "ms_at_alone": part, "efficiency": efficiency, "same_bits": same,
        }  # fmt: skip
        say(
            f"{context:8} {ms:7.3f} {1e3 / ms:7.1f} {roofline:9.1f} {1e3 / ms / roofline:6.1%} {1 - without / ms:6.1%}   "
            f"{alone[context]:.3f} ms, {part:.3f} ms, {efficiency:.1%}" + ("" if all(ranks.gather(same)) else "   BITS DIFFER")
        )
    context = CONTEXTS[-1]
    everything = Kept(shared)
    whole_ms = decode(everything, mine, weights, context, 10)[0]
    say(f"\nus of each layer at {context} by verb: what the step saves without it ({whole_ms * 1e3 / layers:.1f} in all)")
    for verb in everything.called:
        saved = (whole_ms - decode(Kept(shared, (verb,)), mine, weights, context, 10)[0]) * 1e3 / layers
        figures[f"us_per_layer {verb}"] = saved
        say(f"{verb:>14} {saved:7.2f}")
    return figures


def sums(ops, collective, n: int, timer, times: int = 64) -> dict[str, float]:
    """us of one sum of n values in a graph, by NCCL and, where it runs, by the exchange kernel."""
    found, inboxes = {}, collective.inboxes
    for name in ("NCCL", "exchange") if inboxes else ("NCCL",):
        collective.inboxes = name == "exchange"
        x = ops.array(np.zeros((1, n)), np.float32)

        def chain(x=x):
            for _ in range(times):
                x = collective.sum(x)
            return x

        found[name] = timer.ms(ops.repeat(chain)) * 1e3 / times
    collective.inboxes = inboxes
    return found
