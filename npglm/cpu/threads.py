"""How work is shared among threads: items are handed out one by one, so results do not depend on who computes what."""

import os
from functools import partial
from pathlib import Path

from numba import config, get_num_threads, prange, set_num_threads, threading_layer

from npglm.cpu.jit import entry, kernel
from npglm.cpu.simd import call_2
from npglm.errors import NpglmError

# A parallel region costs about 2 us with OpenMP or TBB; Numba's own workqueue takes 120.
config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Between two regions libgomp's threads spin, 300,000 times or 2 ms by default, before they sleep. Where another program has one of the
# cores, nearly every region then takes that long. libgomp reads this when it is loaded, which the first region does.
SPINS = 30_000  # some 0.2 ms: longer than what lies between regions
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)


@partial(entry, parallel=True)
def on_all_threads(kernel, arguments, n_threads):
    """Call the kernel at address `kernel` with (arguments, thread) on each thread. The one parallel region of this package."""
    for thread in prange(n_threads):
        call_2(kernel, arguments, thread)


@kernel
def _nothing(arguments, thread):
    pass


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    return len(cores)


def start(threads: int | None) -> int:
    """Start the pool; returns its number of threads. Raises NpglmError when Numba has no OpenMP or TBB."""
    wanted = threads or physical_cores()
    wanted = min(wanted, config.NUMBA_NUM_THREADS)
    set_num_threads(wanted)
    on_all_threads(_nothing.address, 0, wanted)
    if threading_layer() not in ("omp", "tbb"):
        raise NpglmError(f"Numba's threading layer is {threading_layer()}; expected omp or tbb (install libgomp1 or tbb)")
    return get_num_threads()
