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
from npglm.gpu.collective import Collective, own_gpu
from npglm.parallel import RankOps, Sharding

ALONE = 36  # layers that one GPU holds by itself
CONTEXTS = (0, 4096)
# Ranks that add nothing up, and take their own part for the whole.
QUIET = SimpleNamespace(sum=lambda x: x, join=lambda x, first, n: x, outbox=lambda: None, barrier=lambda: None)
VERBS = (
    "rope_table", "embed", "rms_norm", "projections", "indexer", "attend", "linear", "add_norm", "dense_ffn", "moe_ffn",
)  # fmt: skip


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
    """An op set, some of whose verbs run only before a step is captured; the captured step takes what they made then."""

    def __init__(self, ops, verbs=()):
        self.ops, self.made, self.again = ops, [], None
        for name in verbs:
            setattr(self, name, self._kept(getattr(ops, name)))

    def __getattr__(self, name):
        value = getattr(self.ops, name)
        return value.__func__.__get__(self) if name == "decode" else value  # a loop over these verbs

    def _kept(self, verb):
        def call(*arguments, **options):
            if self.again:
                return next(self.again)
            self.made.append(verb(*arguments, **options))
            return self.made[-1]

        return call

    def repeat(self, function):
        def step():
            self.again = iter(self.made) if self.made else None  # nothing is made yet in the first run
            return function()

        return self.ops.repeat(step)


class Bench:
    """What the parts of bench() share. config: the whole model's, mine: the rank's."""

    def __init__(self, ranks, shape: str, layers: int, say):
        self.ranks, self.say, self.whole = ranks, say, SHAPES[shape]
        self.ops = op_set("ggml", "gpu", index=own_gpu(ranks))
        self.config, self.timer, self.random = cut(self.whole, layers), Timer(self.ops), Random(self.ops)
        self.pool = self.ops.device.cupy.get_default_memory_pool()
        self.n_alone = min(ALONE, layers)
        self.sharding = Sharding(outline(self.config), ranks.world, "tensor")
        self.mine = self.sharding.config(self.config, ranks.rank)

    def bandwidths(self) -> list[float]:
        """GB/s of every rank's GPU."""
        found = self.ranks.gather(self.timer.copy_gbs())
        self.pool.free_all_blocks()
        return found

    def decode(self, ops, config, weights, context: int, replays: int = REPLAYS) -> tuple[float, bytes]:
        """ms a token, and the last logits."""
        cache = make_cache(ops, config, context + 2 * replays)
        decoder = ops.decode(npglm.forward.forward, weights, config, cache)
        decoder.start(5, context)
        ms = self.timer.ms(decoder.repeat, replays)
        logits = ops.numpy(decoder.repeat()[0]).tobytes()
        del decoder, cache
        self.pool.free_all_blocks()
        return ms, logits

    def alone(self) -> dict[int, float]:
        """context -> ms a token of the first n_alone layers on rank 0 by itself."""
        found = {}
        if self.ranks.rank == 0:
            few = cut(self.whole, self.n_alone)
            weights = self.random.model(few)
            found = {context: self.decode(self.ops, few, weights, context)[0] for context in CONTEXTS}
            del weights
            self.pool.free_all_blocks()
        return self.ranks.share(found)

    def weights(self) -> SimpleNamespace:
        """The rank's part."""
        weights = self.random.model(self.mine)
        _, start, stop = self.sharding.bounds("output", self.ranks.rank)
        weights.output = self.random.weight("output", "q8_0", (stop - start, self.config.hidden))
        return weights

    def over(self, collective, weights) -> RankOps:
        ops = RankOps(self.ops, collective, self.config, self.sharding, self.ranks.rank)
        ops.over(weights)
        return ops

    def contexts(self, shared, weights, alone: dict[int, float], bandwidths: list[float]) -> dict:
        """The table of decode by context: against the roofline, without the sums, and against one rank."""
        n = self.n_alone
        self.say(f"\ndecode, graph replay, median of {REPLAYS}")
        self.say(
            f"{'context':>8} {'ms':>7} {'tok/s':>7} {'roofline':>9} {'of it':>6} {'sums':>6}   "
            f"{n} layers: one rank, {self.ranks.world} ranks, efficiency"
        )
        few, first = cut(self.mine, n), SimpleNamespace(**{**vars(weights), "layers": weights.layers[:n]})
        figures = {}
        for context in CONTEXTS:
            ms, logits = self.decode(shared, self.mine, weights, context)
            same = len(set(self.ranks.gather(logits))) == 1
            same &= self.decode(shared, self.mine, weights, context)[1] == logits
            same = all(self.ranks.gather(same))
            without = self.decode(self.over(QUIET, weights), self.mine, weights, context)[0]
            part = self.decode(shared, few, first, context)[0]
            read = per_token(outline(self.config), context)
            n_bytes = read["weights_total"] + read["latent_kv"] + read["indexer_keys"]
            roofline = sum(bandwidths) * 1e9 / n_bytes
            efficiency = alone[context] / (self.ranks.world * part)
            figures[f"decode @{context}"] = {
                "ms": ms, "tok_s": 1e3 / ms, "bytes": n_bytes, "roofline_tok_s": roofline, "share": 1e3 / ms / roofline,
                "sums_share": 1 - without / ms, "ms_at_alone": part, "efficiency": efficiency, "same_bits": same,
            }  # fmt: skip
            self.say(
                f"{context:8} {ms:7.3f} {1e3 / ms:7.1f} {roofline:9.1f} {1e3 / ms / roofline:6.1%} {1 - without / ms:6.1%}   "
                f"{alone[context]:.3f} ms, {part:.3f} ms, {efficiency:.1%}" + ("" if same else "   BITS DIFFER")
            )
        return figures

    def verbs(self, weights) -> dict[str, float]:
        """The table of what a step without sums saves without each verb."""
        shared = self.over(QUIET, weights)
        context, layers, replays = CONTEXTS[-1], self.config.n_layers, 10
        whole_ms = self.decode(Kept(shared), self.mine, weights, context, replays)[0]
        self.say(
            f"\nus of each layer at {context} by verb: what a step without sums saves without it ({whole_ms * 1e3 / layers:.1f} in all)"
        )
        figures = {}
        for verb in VERBS:
            ms = self.decode(Kept(shared, (verb,)), self.mine, weights, context, replays)[0]
            saved = figures[f"us_per_layer {verb}"] = (whole_ms - ms) * 1e3 / layers
            self.say(f"{verb:>14} {saved:7.2f}")
        return figures


def bench(ranks, shape: str = "glm-5.2", layers: int = 78, say=print) -> dict:
    """Print the tables on rank 0; returns every figure, and same_bits: whether all ranks made the same logits, always. Called by
    all ranks together."""
    b = Bench(ranks, shape, layers, say)
    ops, bandwidths = b.ops, b.bandwidths()
    say(f"{ranks.world} x {ops.device.name}: copy " + ", ".join(f"{g:.0f}" for g in bandwidths) + " GB/s (read + written)")
    figures = {"device": ops.device.name, "ranks": ranks.world, "layers": layers, "copy_gbs": bandwidths}
    hidden, collective = b.config.hidden, Collective(ops, ranks)
    figures["sum_us"] = sums(ops, collective, hidden, b.timer)
    say(f"sum of {hidden} values over the ranks: " + ", ".join(f"{k} {us:.1f} us" for k, us in figures["sum_us"].items()))
    alone = figures["alone_ms"] = b.alone()
    weights = b.weights()
    shared = b.over(collective, weights)
    free, total = ops.device.free_bytes()
    say(f"{layers} layers, {(total - free) / 2**30:.1f} GiB of each GPU's {total / 2**30:.1f} in use")
    decoded = b.contexts(shared, weights, alone, bandwidths)
    return figures | decoded | {"same_bits": all(d["same_bits"] for d in decoded.values())} | b.verbs(weights)


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
