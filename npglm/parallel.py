"""Ranks: several processes, started by mpirun, that share one model. MPI (mpi4py) finds them and adds up what is on the host;
npglm.gpu.collective adds up what is on GPUs.

`started()` gives the Ranks of this process, or None where it is alone; `share(checkpoint, ops, ranks, experts)` gives what the forward
pass then takes: the rank's part of the checkpoint, cut on quantised bytes by the table beside the tensor table, and the op set that adds
up over the ranks, twice a layer. Rank and world come from the Ranks object and from nowhere else.
"""

import atexit
import contextlib
import fcntl
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from npglm.checkpoint import EXPERT_SPLITS, SPLITS, Checkpoint, Tensor
from npglm.errors import NpglmError
from npglm.trace.probes import NO_PROBE

# What an mpirun tells its processes: how many they are, which of them this one is; and the MPI that goes with it.
LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"), ("PMI_SIZE", "PMI_RANK", "MPICH or its kin"))

# --- the ranks --------------------------------------------------------------------------------------------------------------


class Ranks:
    """rank of world processes; local_rank of local_world on this host, whose first rank is `host`.

    Every method but path(), outbox() and fail() is called by all ranks together.
    """

    def __init__(self, mpi, stderr):
        self._mpi, self._comm, self._stderr = mpi, mpi.COMM_WORLD, stderr
        self.rank, self.world = self._comm.rank, self._comm.size
        host = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_world = host.rank, host.size
        self.host = host.bcast(self.rank)
        # An open file without a name, on each host: who writes the first byte of it says what went wrong.
        self._failed, name = tempfile.mkstemp(prefix="npglm-") if self.local_rank == 0 else (None, None)
        name = host.bcast(name)
        if self.local_rank:
            self._failed = os.open(name, os.O_RDWR)  # not inherited: flock is between open files
        host.barrier()
        if self.local_rank == 0:
            os.unlink(name)
        self._comm.barrier()

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of all ranks' arrays (of one shape and dtype), added up in the order of ranks: the same bits everywhere, always."""
        array = np.ascontiguousarray(array)
        parts = np.empty((self.world, *array.shape), array.dtype)
        self._comm.Allgather(array, parts)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def join(self, x, first: int, n: int) -> np.ndarray:
        """x [T,m], whose columns are those from `first` on of n, and other ranks' -> [T,n], the same on all of them."""
        return self.sum(padded(x, first, n, np))

    def outbox(self) -> None:
        """A way by which a product itself gives its part of a sum: not on the host. See npglm.gpu.collective."""

    def share(self, value):
        """Rank 0's value (anything that can be pickled), on every rank."""
        return self._comm.bcast(value)

    def gather(self, value) -> list:
        """The values of all ranks, in their order, on every rank."""
        return self._comm.allgather(value)

    def agree(self, values: dict) -> None:
        """Raises NpglmError on every rank when the ranks' values differ; it names the first that does."""
        everyone = self.gather(values)
        for name in dict.fromkeys(name for one in everyone for name in one):
            for rank, theirs in enumerate(everyone):
                if theirs.get(name) != everyone[0].get(name):
                    both = f"rank 0 has {name} {everyone[0].get(name)}, rank {rank} has {theirs.get(name)}"
                    raise NpglmError(f"{both}: all ranks take the same")

    def barrier(self) -> None:
        self._comm.barrier()

    def path(self, path) -> Path:
        """OUT.safetensors -> OUT.rN.safetensors."""
        there = Path(path).exists() and not Path(path).is_file()
        if str(path).endswith(("/", "..")) or not Path(path).name or there:
            raise NpglmError(f"{path}: cannot be written: not a regular file")
        path = Path(path)
        return path.with_name(f"{path.stem}.r{self.rank}{path.suffix}")

    def fail(self, message: str, status: int) -> None:
        """End all ranks with this exit status. The first rank of a host that fails prints its message; the others' would be its
        consequence. Nothing here waits for another rank, which may be anywhere, for ever."""
        fcntl.flock(self._failed, fcntl.LOCK_EX)
        first = not os.pread(self._failed, 1, 0)
        os.pwrite(self._failed, b"!", 0)
        fcntl.flock(self._failed, fcntl.LOCK_UN)
        if not first:
            time.sleep(60)  # the first one ends this process
        with contextlib.suppress(OSError):
            print(message, end="\n" if message else "", file=self._stderr, flush=True)
        time.sleep(0.3)  # until mpirun has passed it on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI has nothing to add
        self._comm.Abort(status)


def started() -> Ranks | None:
    """The ranks that mpirun started, or None where this process is alone. stdout of all but rank 0 goes nowhere from here on, and
    stderr too once they know each other.

    Raises NpglmError, in one line, where mpi4py does not work or belongs to another MPI than mpirun.
    """
    launcher = next((names for names in LAUNCHERS if all(os.environ.get(n, "").isdecimal() for n in names[:2])), None)
    world, rank = (int(os.environ[name]) for name in launcher[:2]) if launcher else (1, 0)
    if world < 2:
        return None
    nowhere = open(os.devnull, "w") if rank else None  # noqa: SIM115 - for the rest of the run
    sys.stdout = nowhere or sys.stdout
    try:
        ranks = Ranks(_mpi(world, rank, launcher[2]), sys.stderr)
    except (Exception, KeyboardInterrupt):
        time.sleep(min(rank, 5))  # mpirun ends this process meanwhile, if a rank below has failed alike and said so
        atexit.register(_end_all)  # when this rank's message is out
        raise
    sys.stderr = nowhere or sys.stderr
    return ranks


def _end_all() -> None:
    """End the ranks that wait for this one in MPI, which it never reached: Open MPI does it by itself, others are told by PMI-1."""
    if "PMI_FD" in os.environ:
        time.sleep(0.3)  # until mpirun has passed the message on
        with contextlib.suppress(OSError, ValueError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=2\n")
            time.sleep(5)


def _mpi(world: int, rank: int, maker: str):
    """mpi4py's MPI, initialized, which sees what mpirun says. Raises NpglmError."""
    start = f"mpirun started {world} ranks, but mpi4py"
    try:
        with warnings.catch_warnings(action="ignore"):  # mpi4py's own, of what the check below says
            import mpi4py

            mpi4py.rc(initialize=False, finalize=True)  # a wrong MPI would end the process then
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NpglmError(f"{start} does not work: {str(error).strip().splitlines()[0]} (pip install 'npglm[mpi]')") from None
    vendor = MPI.get_vendor()[0]
    if (vendor == "Open MPI") != (maker == "Open MPI"):
        raise NpglmError(f"{start} uses {vendor}: this mpirun is of {maker}")
    MPI.Init_thread()
    if (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank) != (world, rank):
        raise NpglmError(f"{start} sees {MPI.COMM_WORLD.size}: its {vendor} is not the one that mpirun is of")
    return MPI


# --- what a rank holds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """`size` of something (heads, columns, experts), of which ranks take whole grains: the fewest that cut no quantised block."""

    size: int
    grain: int = 1
    tensor: Tensor | None = None  # that makes the grain what it is

    @property
    def most(self) -> int:
        """The most ranks that can share it."""
        return self.size // self.grain

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """First and last + 1 of the rank's."""
        return self.most * rank // world * self.grain, self.most * (rank + 1) // world * self.grain


class Sharding:
    """Who of `world` ranks holds what. experts: "tensor" cuts each routed expert, "expert" deals them out whole."""

    def __init__(self, checkpoint: Checkpoint, world: int, experts: str):
        """Raises NpglmError when the ranks are too many: it names the tensor and the numbers of ranks that work."""
        self.world, self.splits = world, SPLITS | EXPERT_SPLITS[experts]
        self.shares = shares(checkpoint, self.splits)
        for what, share in self.shares.items():
            if share.most < world:
                raise NpglmError(f"{checkpoint.path.name}: {_refusal(what, share, world)}; {_what_works(checkpoint)}")

    def bounds(self, attribute: str, rank: int) -> tuple[int, int, int] | None:
        """(axis, start, stop) of the rank's part of a tensor, in units of its Share; None where it is whole."""
        if attribute not in self.splits:
            return None
        axis, what = self.splits[attribute]
        return axis, *self.shares[what].bounds(rank, self.world)

    def part(self, tensor: Tensor, attribute: str, rank: int) -> Tensor:
        """The rank's part of the tensor; the tensor itself where it is not split."""
        if attribute not in self.splits:
            return tensor
        axis, start, stop = self.bounds(attribute, rank)
        each = tensor.shape[axis] // self.shares[self.splits[attribute][1]].size  # rows or columns of one head
        return Part(tensor, axis, start * each, stop * each)

    def config(self, config, rank: int):
        """The config of one rank: its heads and FFN columns. The router still sees all experts."""
        fields = {
            "heads": "n_heads",
            "FFN columns": "ffn",
            "shared expert columns": "shared_ffn",
            "expert columns": "expert_ffn",
        }
        sizes = {what: stop - start for what, s in self.shares.items() for start, stop in [s.bounds(rank, self.world)]}
        return replace(config, **{fields[what]: n for what, n in sizes.items() if what in fields})


def shares(checkpoint: Checkpoint, splits: dict) -> dict[str, Share]:
    """What is shared out -> its Share, over all layers of the checkpoint."""
    sizes = {
        "heads": "H", "vocabulary rows": "Y", "FFN columns": "F", "shared expert columns": "S*G", "expert columns": "G", "experts": "E",
    }  # fmt: skip
    found: dict[str, Share] = {}
    for part in (checkpoint.weights, *checkpoint.weights.layers):
        for attribute, (axis, what) in splits.items():
            tensor = getattr(part, attribute, None)
            if tensor is None:
                continue
            share = found.setdefault(what, Share(checkpoint.config.axes[sizes[what]]))
            if axis == len(tensor.shape) - 1:
                block = GGML_QUANT_SIZES[tensor.type][0]
                grain = block // gcd(block, tensor.shape[-1] // share.size)
                if share.grain % grain:
                    found[what] = Share(share.size, lcm(share.grain, grain), tensor)
    return found


def _refusal(what: str, share: Share, world: int) -> str:
    if share.tensor is None:
        return f"{share.size} {what} cannot be shared by {world} ranks"
    block = GGML_QUANT_SIZES[share.tensor.type][0]
    return f"tensor {share.tensor.name}: {world} ranks would cut its {share.tensor.type.name} blocks of {block} ({share.size} {what})"


def _what_works(checkpoint: Checkpoint) -> str:
    ways = []
    for experts, split in EXPERT_SPLITS.items():
        most = min(share.most for share in shares(checkpoint, SPLITS | split).values())
        ways.append(
            f"--experts {experts} works with "
            + (f"2 to {most} ranks" if most > 2 else "2 ranks" if most == 2 else "1 rank only")
        )
    return ", ".join(ways)


class Part(Tensor):
    """A rank's part of a tensor: [start, stop) of one axis, as a view of the mapped bytes."""

    def __init__(self, whole: Tensor, axis: int, start: int, stop: int):
        block, block_bytes = GGML_QUANT_SIZES[whole.type]
        view = whole.data.reshape(*whole.shape[:-1], -1)  # [..., row_bytes]
        if axis == len(whole.shape) - 1:
            view = view[..., start // block * block_bytes : stop // block * block_bytes]
        else:
            view = view[(slice(None),) * axis + (slice(start, stop),)]
        shape = (*whole.shape[:axis], stop - start, *whole.shape[axis + 1 :])
        for name, value in {
            "name": whole.name,
            "type": whole.type,
            "source": whole.source,
            "shape": shape,
            "view": view,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.shape[:-1]))

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        n = self.view.shape[-2] if self.view.ndim == 3 else 1  # rows of a matrix, of which none is read that is not asked for
        matrices = np.ascontiguousarray(self.view[start // n : -(-stop // n)])
        return matrices.reshape(-1, self.view.shape[-1])[start % n if n > 1 else 0 :][: stop - start]

    @property
    def data(self) -> np.ndarray:
        """uint8 [n_rows, row_bytes]: mapped where the part is one run of the file, else a copy, made anew each time."""
        return self._bytes(0, self.n_rows)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return dequantize(self._bytes(start, stop), self.type)


class RankCheckpoint:
    """One rank's part of a checkpoint, with the same interface; config has the rank's own sizes."""

    def __init__(self, whole: Checkpoint, ranks, experts: str):
        self.whole, self.ranks, self.experts = whole, ranks, experts
        self.sharding = Sharding(whole, ranks.world, experts)
        self.config = self.sharding.config(whole.config, ranks.rank)

    def __getattr__(self, name):
        return getattr(self.whole, name)

    @cached_property
    def weights(self) -> SimpleNamespace:
        def cut(part: SimpleNamespace) -> SimpleNamespace:
            tensors = {a: t for a, t in vars(part).items() if a != "layers"}
            return SimpleNamespace(**{a: t and self.sharding.part(t, a, self.ranks.rank) for a, t in tensors.items()})

        weights = cut(self.whole.weights)
        weights.layers = [cut(layer) for layer in self.whole.weights.layers]
        return weights


# --- the op set of a rank ---------------------------------------------------------------------------------------------------


class RankOps:
    """An op set over a rank's part of the weights: its own verbs, and the sums over the ranks that make their results whole.

    Sums are made of attn_output's product and of the whole FFN: two a layer. Logits are put together once. A sum that add_norm takes
    next, and that nobody probes, may be left to it and to the kernel that makes this rank's part (Collective.outbox).
    """

    def __init__(self, ops, collective, config, sharding: Sharding, rank: int):
        """collective: sum(array) -> the sum over the ranks, on the op set's device; join(); barrier(); outbox, add_norm. config: the whole model's."""
        self.ops, self._collective, self._part = ops, collective, None
        self._vocab, self._first = config.vocab, sharding.bounds("output", rank)[1]
        self._experts = None  # first of the rank's, how many; None: a part of each
        if sharding.splits["ffn_gate_exps"][0] == 0 and "experts" in sharding.shares:
            first, stop = sharding.bounds("ffn_gate_exps", rank)[1:]
            self._experts = first, stop - first

    def __getattr__(self, name):
        value = getattr(self.ops, name)
        return value.__func__.__get__(self) if name == "decode" else value  # a loop over this forward pass, sums and all

    def load(self, checkpoint, *args, **options) -> SimpleNamespace:
        return self.over(self.ops.load(checkpoint, *args, **options))

    def over(self, weights: SimpleNamespace) -> SimpleNamespace:
        """Take these as the weights, of which linear() knows the split ones."""
        self._output, self._partial = weights.output, {id(w.attn_output) for w in weights.layers}
        return weights

    def traced(self) -> "RankOps":
        """The same over the small verbs. What a rank has of a sum is probed before it is added up."""
        other = object.__new__(RankOps)
        other.__dict__ |= vars(self) | {"ops": self.ops.traced()}
        return other

    def embed(self, *args, **options):
        """A forward pass begins here: the ranks wait for each other on the host, for as long as it takes (a rank may still load, or
        print to a pipe that nobody reads), and not in a kernel, whose patience has an end (raw_kernels/inbox.hip)."""
        self._collective.barrier()
        return self.ops.embed(*args, **options)

    def repeat(self, function):
        again = self.ops.repeat(function)

        def repeat():
            self._collective.barrier()  # as in embed(), which a graph does not repeat
            return again()

        return repeat

    def linear(self, x, w):
        if id(w) in self._partial:
            return self._sum(self.ops.linear, x, w)
        y = self.ops.linear(x, w)
        if w is self._output:
            return self._collective.join(y, self._first, self._vocab)
        return y

    def dense_ffn(self, h, w, probe=NO_PROBE):
        return self._sum(self.ops.dense_ffn, h, w, probe)

    def moe_ffn(self, h, w, config, probe=NO_PROBE):
        experts, weights = self.ops.route(h, w, config, probe, held=self._experts)
        return self._sum(self.ops.moe_experts, h, w, experts, weights, probe)

    def _sum(self, verb, *arguments):
        """The sum over the ranks of what a verb makes; where the verb sends it out itself, its own part, for add_norm."""
        outbox = self._collective.outbox()
        if outbox is None or not self.ops.fused:
            return self._collective.sum(verb(*arguments))
        y = verb(*arguments, to=outbox)
        if not outbox.sent:
            return self._collective.sum(y)
        self._part = y
        return y

    def add_norm(self, x, y, weight, eps: float):
        if y is self._part:
            self._part = None
            return self._collective.add_norm(x, weight, eps)
        return self.ops.add_norm(x, y, weight, eps)


def padded(x, first: int, n: int, ops):
    """x [T,m] -> [T,n]: the same from column `first` on, and zeros. ops.empty(shape, dtype) makes the array."""
    whole = ops.empty((len(x), n), x.dtype)
    whole[...] = 0
    whole[:, first : first + x.shape[1]] = x
    return whole


def share(checkpoint: Checkpoint, ops, ranks: Ranks, experts: str) -> tuple[RankCheckpoint, RankOps]:
    """A whole checkpoint and an op set -> this rank's. Raises NpglmError when the model cannot be shared like that."""
    backends = set(ranks.gather(ops.backend))  # --backend auto takes what each finds
    if len(backends) > 1:
        raise NpglmError(f"some ranks would run on {' and some on '.join(sorted(backends))}: name one with --backend")
    ranks.agree({"a model with header": checkpoint.sha256, "bytes of tensors": checkpoint.n_bytes})
    part = RankCheckpoint(checkpoint, ranks, experts)
    collective = ranks
    if ops.backend == "gpu":
        from npglm.gpu.collective import Collective

        collective = Collective(ops, ranks)
    return part, RankOps(ops, collective, checkpoint.config, part.sharding, ranks.rank)


# --- proof ------------------------------------------------------------------------------------------------------------------


def check_shards(weights: SimpleNamespace, checkpoint: RankCheckpoint, ops) -> int:
    """Compare what this rank's device holds, byte by byte, with the slice of the file that it should hold. Returns the number of tensors.

    Raises NpglmError on every rank when any rank holds something else; it names the rank, the tensor and whose part that is.
    """
    ranks, sharding, whole = checkpoint.ranks, checkpoint.sharding, checkpoint.whole.weights
    wrong, n = [], 0
    for loaded, tensors in [(weights, whole), *zip(weights.layers, whole.layers, strict=True)]:
        for attribute, tensor in vars(tensors).items():
            if attribute == "layers" or tensor is None:
                continue
            held, n = ops.file_bytes(getattr(loaded, attribute)), n + 1
            if not np.array_equal(held, _expected(tensor, attribute, sharding, ranks.rank)):
                others = (r for r in range(ranks.world) if np.array_equal(held, _expected(tensor, attribute, sharding, r)))
                whose, part = next(others, None), "half" if ranks.world == 2 else "part"
                what = "bytes that are no rank's" if whose is None else f"rank {whose}'s {part}"
                wrong.append(f"rank {ranks.rank} holds {what} of tensor {tensor.name}")
    wrong = [line for lines in ranks.gather(wrong) for line in lines]
    if wrong:
        more = len(wrong) - 1
        raise NpglmError(wrong[0] + (f"; {more} more tensor{'s are' if more > 1 else ' is'} wrong" if more else ""))
    return n


def _expected(tensor: Tensor, attribute: str, sharding: Sharding, rank: int) -> np.ndarray:
    """What a rank should hold of a tensor: uint8 [rows, row_bytes], or a vector's f32 [n]. Found block by block, not as Part does it."""
    if len(tensor.shape) == 1:
        return tensor.decode()
    if attribute not in sharding.splits:
        return tensor.data
    axis, first, stop = sharding.bounds(attribute, rank)
    size = sharding.shares[sharding.splits[attribute][1]].size
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = tensor.data.reshape(*tensor.shape[:-1], -1, block_bytes)
    per_place = tensor.shape[axis] * 1.0 / size / (block if axis == len(tensor.shape) - 1 else 1)
    places = np.arange(round(first * per_place), round(stop * per_place))
    mine = np.take(blocks, places, axis)
    return mine.reshape(-1, mine.shape[-2] * block_bytes)
