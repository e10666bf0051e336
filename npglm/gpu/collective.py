"""Sums over ranks that have a GPU each. NCCL or RCCL (cupy.cuda.nccl) moves what is large; what one decoded token makes is moved by
our own kernels between GPUs of one host that can write into each other's memory (raw_kernels/inbox.hip). Both go into a captured step.
"""

import numpy as np

from npglm.errors import NpglmError
from npglm.gpu.device import visible
from npglm.gpu.elementwise import sum_add_norm
from npglm.gpu.matmul import NOWHERE
from npglm.parallel import padded

BLOCK = 256  # values of a sum that a block of threads makes
CAPACITY = 1 << 18  # values that an inbox holds of each rank: the logits of a step


def own_gpu(ranks) -> int:
    """Which of the GPUs that this process sees is its own. Raises NpglmError where a host has too few. Called by all ranks together."""
    try:
        seen, problem = visible(), None
    except NpglmError as error:
        seen, problem = [], error
    everyone = ranks.gather((ranks.host, seen))
    if problem:
        raise problem
    return choose([ids for host, ids in everyone if host == ranks.host], ranks.local_rank)


def choose(seen: list[list[str]], rank: int) -> int:
    """seen: what visible() gives on each rank of a host -> the index of this rank's GPU: its own one where each sees only that."""
    if all(len(ids) == 1 for ids in seen) and len({ids[0] for ids in seen}) == len(seen):
        return 0
    n = len(seen[rank])
    if rank >= n:
        raise NpglmError(f"{rank + 1} or more ranks on a host with {n} GPU{'s' * (n > 1)}: each rank needs its own")
    return rank


class Outbox:
    """The way of one sum's part to all ranks: the kernel that makes it puts it into their inboxes. where: the arguments for that.
    sent: whether a kernel has done so."""

    def __init__(self, where: tuple):
        self.where, self.sent = where, False

    def send(self, y) -> tuple:
        """The last arguments of the kernel that makes y [1,n]. NOWHERE, where add_norm() does not take such a sum."""
        self.sent = len(y) == 1 and y.size % 256 == 0 and y.size <= CAPACITY
        return self.where if self.sent else NOWHERE


class Collective:
    """npglm.parallel.Ranks for arrays on GPUs. ops: the rank's own op set. inboxes: whether there are any."""

    def __init__(self, ops, ranks):
        """Raises NpglmError when CuPy has no NCCL or it does not start. Called by all ranks together."""
        self.ops, self.ranks = ops, ranks
        self._nccl = ops.device.nccl()
        try:
            key = ranks.share(self._nccl.get_unique_id() if ranks.rank == 0 else None)
            self._communicator = self._nccl.NcclCommunicator(ranks.world, key, ranks.rank)
        except self._nccl.NcclError as error:
            raise NpglmError(f"NCCL does not start: {error}") from None
        self.inboxes = self._open_inboxes()

    def _open_inboxes(self) -> bool:
        """Two inboxes on each rank, zeroed and opened by all others: for sum() and join(), and for add_norm(). False where GPUs cannot do that."""
        device, ranks = self.ops.device, self.ranks
        runtime = device.cupy.cuda.runtime
        ids = visible()
        others = set(ranks.gather(ids[device.id])) - {ids[device.id]}
        peers = [ids.index(other) for other in others if other in ids]  # of the rest, opening shows it
        near = (
            not device.hip
            and ranks.local_world == ranks.world
            and all(runtime.deviceCanAccessPeer(device.id, i) for i in peers)
        )
        if not all(ranks.gather(near)):
            return False
        half = 2 * ranks.world * CAPACITY * 8
        n_bytes = 2 * half
        mine = runtime.malloc(n_bytes)  # by itself, not from a pool: the whole allocation is opened
        runtime.memset(mine, 0, n_bytes)
        device.synchronize()
        handles = ranks.gather(runtime.ipcGetMemHandle(mine))
        addresses = [mine] * ranks.world
        try:
            for r in set(range(ranks.world)) - {ranks.rank}:
                addresses[r] = runtime.ipcOpenMemHandle(handles[r])
        except runtime.CUDARuntimeError:  # as in some containers, or because a GPU that is not visible here is not near
            addresses = []
        if not all(ranks.gather(bool(addresses))):
            return False
        self._sums, self._norms = (
            (
                self.ops.array([address + start for address in addresses], np.uint64),
                self.ops.array(np.zeros(CAPACITY // BLOCK), np.int32),  # calls, counted by each block of threads
                *(CAPACITY, ranks.rank, ranks.world),
            )
            for start in (0, half)
        )
        ranks.barrier()
        return True

    def barrier(self) -> None:
        self.ranks.barrier()

    def sum(self, x):
        """The sum of all ranks' arrays f32 of one shape, the same bits on all of them."""
        y = self.ops.empty(x.shape, np.float32)
        if self.inboxes and x.size <= CAPACITY:
            return self._exchange(x, y, 0)
        stream = self.ops.device.cupy.cuda.get_current_stream().ptr
        self._communicator.allReduce(x.data.ptr, y.data.ptr, x.size, self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM, stream)
        return y

    def join(self, x, first: int, n: int):
        """x [T,m], whose columns are those from `first` on of n, and other ranks' -> [T,n], the same on all of them."""
        if self.inboxes and len(x) == 1 and n <= CAPACITY:
            return self._exchange(x, self.ops.empty((1, n), np.float32), first)
        return self.sum(padded(x, first, n, self.ops))

    def _exchange(self, x, y, first: int):
        inboxes, calls, *where = self._sums
        self.ops.launch("exchange_sum_f32", (-(-y.size // BLOCK),), BLOCK, x, y, inboxes, calls, y.size, first, x.size, *where)
        return y

    def outbox(self) -> Outbox | None:
        """For one sum that add_norm() takes next; None where there are no inboxes."""
        return Outbox(self._norms) if self.inboxes and self.ops.fused and self.ops.rounds else None

    def add_norm(self, x, weight, eps: float):
        """ops.add_norm(x, sum, weight, eps) with the sum that the last outbox has sent."""
        return sum_add_norm(x, weight, eps, self._norms, ops=self.ops)
