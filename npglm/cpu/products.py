"""Lists of jobs, shared out among threads: every matrix product of the forward pass comes through here."""

from npglm.cpu import workspace
from npglm.cpu.activations import AS_F32, RECORD_BYTES, keep_row, kept_as, pack_panel, panel_bytes
from npglm.cpu.jit import inner, kernel
from npglm.cpu.job import (
    BYTES,
    FORM,
    KIND,
    LIST,
    PANELS,
    RECORDS,
    ROW_BYTES,
    ROWS,
    SOURCES,
    TOKENS,
    X_STRIDE,
    Y_STRIDE,
    N,
    X,
    Y,
    get,
    put,
)
from npglm.cpu.matvec import SCRATCH, rows
from npglm.cpu.simd import TOKENS as WIDTH
from npglm.cpu.simd import call_2, call_3, call_4, call_7, fetch_add_one, load_field, load_i64, store_i64
from npglm.cpu.threads import on_all_threads
from npglm.cpu.tiles import rows_per_item, scratch_bytes, tile_rows
from npglm.cpu.workspace import exact, mark, n_threads, release, take

FEW = WIDTH // 3 + 1  # up to so many tokens go one by one over a part of the weights that stays in cache
ITEM_BYTES = 1 << 17  # of weights that a thread takes at a time
SERIAL_KEPT = 1 << 15  # activations, and
SERIAL_BYTES = 1 << 17  # bytes of weights: below this a second thread costs more than it brings


TAKE_ITEMS, KEEP_ROW, PACK_PANEL, ROWS_KERNEL, TILE_ROWS, PRODUCTS = range(6)  # of KERNELS, below


@inner
def function(ws, index):
    """The address of a kernel."""
    return load_field(ws, workspace.KERNELS + index)


@inner
def run_products(ws, jobs, n_jobs):
    """Run the jobs at address `jobs`."""
    call_3(function(ws, PRODUCTS), ws, jobs, n_jobs)


@kernel
def products(ws, jobs, n_jobs):
    """Run the jobs at address `jobs`, if there are any. Neighbours that read the same X share its records and panels."""
    if n_jobs == 0:
        return
    at = mark(ws)
    n_kept = n_panels = scratch = n_bytes = 0
    for i in range(n_jobs):
        job = jobs + BYTES * i
        n, n_tokens, sources = get(job, N), get(job, TOKENS), get(job, SOURCES)
        form = AS_F32 if exact(ws) else kept_as(get(job, KIND))
        put(job, FORM, form)
        put(job, PANELS, 0)
        last = job - BYTES
        same = i > 0 and get(last, X) == get(job, X) and get(last, FORM) == form and get(last, N) == n
        if same and get(last, SOURCES) == sources:
            put(job, RECORDS, get(last, RECORDS))
        else:
            put(job, RECORDS, take(ws, RECORD_BYTES * n * sources))
            n_kept += sources * n
        if n_tokens > FEW:
            if same and get(last, LIST) == get(job, LIST) and get(last, TOKENS) == n_tokens and get(last, PANELS):
                put(job, PANELS, get(last, PANELS))
            else:
                count = (n_tokens + WIDTH - 1) // WIDTH
                put(job, PANELS, take(ws, count * panel_bytes(n, form)))
                n_panels += count
            scratch = max(scratch, scratch_bytes(n, form))
        n_bytes += get(job, ROWS) * get(job, ROW_BYTES) * n_tokens
    scratch = (max(scratch, SCRATCH) + 63) // 64 * 64
    threads = n_threads(ws)
    shared = take(ws, SHARED_BYTES + scratch * threads)
    _share(KEEP, jobs, n_jobs, ws, shared, scratch, threads if n_kept >= SERIAL_KEPT else 1)
    if n_panels:
        _share(PACK, jobs, n_jobs, ws, shared, scratch, threads)
    _share(MULTIPLY, jobs, n_jobs, ws, shared, scratch, threads if n_bytes >= SERIAL_BYTES else 1)
    release(ws, at)


KEEP, PACK, MULTIPLY = range(3)  # the phases; each is done before the next begins
PHASE, JOBS, N_JOBS, WORKSPACE, SCRATCHES, SCRATCH_BYTES, COUNTER = range(
    7
)  # what take_items gets; COUNTER begins a cache line
COUNTER_AT, SHARED_BYTES = 64, 128


@inner
def _share(phase, jobs, n_jobs, ws, shared, scratch_bytes, threads):
    for field, value in ((PHASE, phase), (JOBS, jobs), (N_JOBS, n_jobs), (WORKSPACE, ws), (SCRATCH_BYTES, scratch_bytes)):
        put(shared, field, value)
    put(shared, SCRATCHES, shared + SHARED_BYTES)
    store_i64(shared + COUNTER_AT, 0)
    if threads == 1:
        call_2(function(ws, TAKE_ITEMS), shared, 0)
    else:
        on_all_threads(function(ws, TAKE_ITEMS), shared, threads)


@inner
def _step(job):
    """Rows of the matrix in one item of MULTIPLY."""
    if get(job, PANELS):
        return rows_per_item(get(job, N), get(job, FORM))
    return max(2, ITEM_BYTES // get(job, ROW_BYTES) // 2 * 2)


@inner
def _n_items(phase, job, first):
    if phase == KEEP:
        return get(job, SOURCES) if first or get(job, RECORDS) != get(job - BYTES, RECORDS) else 0
    if phase == PACK:
        owner = get(job, PANELS) and (first or get(job, PANELS) != get(job - BYTES, PANELS))
        return (get(job, TOKENS) + WIDTH - 1) // WIDTH if owner else 0
    step = _step(job)
    return (get(job, ROWS) + step - 1) // step if get(job, TOKENS) else 0


@kernel
def take_items(shared, thread):
    """Take items of the phase until none is left. Jobs are walked through once, as item numbers only grow."""
    phase, job, ws = get(shared, PHASE), get(shared, JOBS), get(shared, WORKSPACE)
    scratch = get(shared, SCRATCHES) + thread * get(shared, SCRATCH_BYTES)
    end, before = job + BYTES * get(shared, N_JOBS), 0  # items before this job
    here = _n_items(phase, job, True)
    while True:
        item = fetch_add_one(shared + COUNTER_AT) - before
        while item >= here:
            item, before, job = item - here, before + here, job + BYTES
            if job == end:
                return
            here = _n_items(phase, job, False)
        n, records, form = get(job, N), get(job, RECORDS), get(job, FORM)
        if phase == KEEP:
            x = get(job, X) + item * get(job, X_STRIDE)
            call_4(function(ws, KEEP_ROW), x, records + RECORD_BYTES * n * item, n, form)
        elif phase == PACK:
            row_list, t = get(job, LIST), item * WIDTH
            source = records if row_list else records + RECORD_BYTES * n * t
            row_list = row_list + 8 * t if row_list else 0
            panel = get(job, PANELS) + item * panel_bytes(n, form)
            call_7(function(ws, PACK_PANEL), source, row_list, min(WIDTH, get(job, TOKENS) - t), panel, n, form, scratch)
        else:
            first = item * _step(job)
            last = min(first + _step(job), get(job, ROWS))
            if get(job, PANELS):
                call_4(function(ws, TILE_ROWS), job, first, last, scratch)
                continue
            row_list = get(job, LIST)
            for t in range(get(job, TOKENS)):
                record = records + RECORD_BYTES * n * (load_i64(row_list + 8 * t) if row_list else t)
                y = get(job, Y) + t * get(job, Y_STRIDE)
                call_7(function(ws, ROWS_KERNEL), job, first, last, record, y, scratch, exact(ws))


KERNELS = (take_items, keep_row, pack_panel, rows, tile_rows, products)
