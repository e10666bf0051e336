// One GPU block on the host: every thread is a fiber, warps run lane by lane, and control moves on only at barriers and
// shuffles. npglm/gpu/emulate.py puts this file before preamble.hip and compiles both with g++ (-DLANES=32 or 64).
//
// Shared memory is one static section, filled with NaN before each block. Dynamic shared memory likewise.
// A shuffle or barrier that only some lanes reach is an error: it would hang or be undefined on a GPU.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

enum State { RUNS, AT_WARP, AT_BLOCK, DONE };
const int MAX_THREADS = 1024, STACK_BYTES = 256 << 10;

struct Fiber {
  void* jump[5];
  State state;
  bool started;
  unsigned parity, slot[2];  // shuffles write the slots in turn, so that one wait per shuffle is enough
  char* stack;
};

Fiber fibers[MAX_THREADS];
void* scheduler[5];
ucontext_t first;  // only to enter a new stack once
int thread, n_threads;
unsigned block[3], grid[3];
void (*body)(void**);
void** arguments;
char* dynamic_shared;
char error[200];

__attribute__((noipa)) void jump(void** target) { __builtin_longjmp(target, 1); }

// AddressSanitizer is told of every change of stack.
#ifdef __SANITIZE_ADDRESS__
const void* scheduler_stack;
size_t scheduler_bytes;
inline void leave_to(Fiber* f) { __sanitizer_start_switch_fiber(nullptr, f->stack, STACK_BYTES); }
inline void leave_to_scheduler() { __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_bytes); }
inline void arrive_in_fiber() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes); }
inline void arrive_in_scheduler() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
#else
inline void leave_to(Fiber*) {}
inline void leave_to_scheduler() {}
inline void arrive_in_fiber() {}
inline void arrive_in_scheduler() {}
#endif

// noipa: to its callers this may change any memory, as the other fibers do meanwhile.
__attribute__((noipa)) void yield(State state) {
  Fiber* f = &fibers[thread];
  f->state = state;
  if (!__builtin_setjmp(f->jump)) {
    leave_to_scheduler();
    jump(scheduler);
  }
  arrive_in_fiber();
}

void fiber_main() {  // the fiber lives on from block to block
  arrive_in_fiber();
  for (;;) {
    body(arguments);
    yield(DONE);
  }
}

__attribute__((noipa)) void resume(int t) {
  thread = t;
  Fiber* f = &fibers[t];
  if (__builtin_setjmp(scheduler)) {
    arrive_in_scheduler();
    return;
  }
  leave_to(f);
  if (f->started) jump(f->jump);
  f->started = true;
  getcontext(&first);
  first.uc_stack.ss_sp = f->stack;
  first.uc_stack.ss_size = STACK_BYTES;
  first.uc_link = nullptr;
  makecontext(&first, fiber_main, 0);
  setcontext(&first);
}

bool fail(const char* what, int warp) {
  if (!error[0])
    snprintf(error, sizeof error, "block (%u,%u,%u), warp %d: %s", block[0], block[1], block[2], warp, what);
  return false;
}

bool run_warp(int warp) {  // until every lane stands at a block barrier or is done
  for (;;) {
    int count[4] = {0, 0, 0, 0};
    for (int t = warp * LANES; t < (warp + 1) * LANES; t++) {
      if (fibers[t].state == RUNS) resume(t);
      count[fibers[t].state]++;
    }
    if (!count[AT_WARP]) return true;
    if (count[AT_WARP] != LANES) return fail("only some lanes reach a shuffle", warp);
    for (int t = warp * LANES; t < (warp + 1) * LANES; t++) fibers[t].state = RUNS;
  }
}

bool run_block() {
  for (int t = 0; t < n_threads; t++) fibers[t].state = RUNS;
  for (;;) {
    int waiting = 0;
    for (int warp = 0; warp < n_threads / LANES; warp++)
      if (!run_warp(warp)) return false;
    for (int t = 0; t < n_threads; t++) waiting += fibers[t].state == AT_BLOCK;
    if (!waiting) return true;
    if (waiting != n_threads) return fail("only some threads reach a block barrier", -1);
    for (int t = 0; t < n_threads; t++) fibers[t].state = RUNS;
  }
}

inline unsigned exchange(unsigned value, int source) {  // the value that lane `source` of this warp gives in the same call
  Fiber* f = &fibers[thread];
  f->parity ^= 1;
  f->slot[f->parity] = value;
  yield(AT_WARP);
  return fibers[thread / LANES * LANES + source].slot[fibers[thread].parity];
}

}  // namespace emu

extern "C" {
extern char __start_emu_shared[] __attribute__((weak));
extern char __stop_emu_shared[] __attribute__((weak));

__attribute__((no_sanitize_address, noinline)) void emu_poison(char* from, char* to) {
  for (volatile char* p = from; p < to; p++) *p = (char)0xff;
}

// Runs all blocks one after the other. Returns 0, 1 with a message in emu_error(), or 2 when there is no memory.
int emu_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, int n_threads, long shared_bytes) {
  for (int t = 0; t < n_threads; t++)
    if (!emu::fibers[t].stack && !(emu::fibers[t].stack = (char*)malloc(emu::STACK_BYTES))) return 2;
  char* shared = emu::dynamic_shared = shared_bytes ? (char*)aligned_alloc(64, (shared_bytes + 63) / 64 * 64) : nullptr;
  if (shared_bytes && !shared) return 2;
#if defined(__x86_64__)
  unsigned csr = _mm_getcsr();
  _mm_setcsr(csr | 0x8040);  // f32 subnormals are flushed, as CuPy's options make GPUs do
#endif
  emu::body = kernel;
  emu::arguments = arguments;
  emu::n_threads = n_threads;
  emu::error[0] = 0;
  for (int i = 0; i < 3; i++) emu::grid[i] = grid[i];
  bool good = true;
  for (unsigned z = 0; z < grid[2] && good; z++)
    for (unsigned y = 0; y < grid[1] && good; y++)
      for (unsigned x = 0; x < grid[0] && good; x++) {
        emu::block[0] = x, emu::block[1] = y, emu::block[2] = z;
        emu_poison(__start_emu_shared, __stop_emu_shared);
        if (shared) memset(shared, 0xff, shared_bytes);
        good = emu::run_block();
      }
  free(shared);
  if (!good)
    for (int t = 0; t < emu::MAX_THREADS; t++) emu::fibers[t].started = false;  // leave what hangs
#if defined(__x86_64__)
  _mm_setcsr(csr);
#endif
  return !good;
}
const char* emu_error() { return emu::error; }
}
