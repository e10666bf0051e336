// Inboxes: memory of a rank that all ranks of its host write into (npglm/gpu/collective.py makes them).
//
// An inbox is u64 [2][world][capacity], zeroed at the start: each value of a rank with the number of the call above it. A value has
// arrived when that number is this call's: no other signal is needed. Calls use the two halves in turn. The half of the last but one
// call is free: who has got a rank's values of the last call knows that the kernel that gave them had begun, so the one that took the
// call's before had ended. Every block of threads that takes values counts the calls, the same number on every rank. In the order of
// ranks: the same bits on all of them.
//
// A rank that is gone writes nothing. Who has looked MAX_POLLS times (about a minute) takes NaN for what is missing, which the next
// sampling turns into an error, and its block of threads does not wait again: its number of calls is LOST from then on.

#ifndef MAX_POLLS
#define MAX_POLLS (1 << 26)
#endif
#define LOST -1
#define NAN_BITS 0x7fffffff

typedef struct { const u64* inboxes; int call, capacity, rank, world; } Ranks;

// calls: how many there were. It is read early, if at all, when no kernel that changes it can run.
DEVICE Ranks ranks_of(const u64* inboxes, const int* calls, int capacity, int rank, int world) {
  int before = *(const volatile int*)calls;
  Ranks o = {inboxes, before == LOST ? LOST : (int)(((u32)before + 1) & 0x7fffffff), capacity, rank, world};
  return o;
}
DEVICE int polls_of(Ranks o) { return o.call == LOST ? 1 : MAX_POLLS; }

DEVICE volatile u64* place_in(Ranks o, int inbox, int rank, int i) {
  return (volatile u64*)o.inboxes[inbox] + ((long long)(o.call & 1) * o.world + rank) * o.capacity + i;
}
// Value i of this rank to all of them.
DEVICE void give(Ranks o, int i, float x) {
  for (int r = 0; r < o.world; r++) *place_in(o, r, o.rank, i) = (u64)(u32)o.call << 32 | as_u32(x);
}

// Two values of a rank with their calls.
DEVICE bool has_come(Ranks o, I4 two) { return two.y == o.call && two.w == o.call && o.call != LOST; }
#define TAKEN_TOGETHER 12
// Of rank r the pairs first, first + N_THREADS, ..., `each` of them: into a and b. Reads are on their way together. *polls: how often
// they may be made. Returns whether any was in vain: then all are NaN.
DEVICE bool take(Ranks o, int r, int first, int each, float* a, float* b, int* polls) {
  const I4* from = (const I4*)place_in(o, o.rank, r, 2 * first);
  I4 part[TAKEN_TOGETHER] = {};
  bool missing = true;
  for (; *polls && missing; *polls -= missing) {
    missing = false;
    UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++) part[k] = read16(from + (k < each ? k * N_THREADS : 0));
    UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++) missing |= !has_come(o, part[k]);
  }
  UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++) {
    a[k] = as_f32(missing ? NAN_BITS : (u32)part[k].x);
    b[k] = as_f32(missing ? NAN_BITS : (u32)part[k].z);
  }
  return missing;
}
// Which of this rank and the next one has given the last of those pairs first, for any thread of the warp; this one if neither does.
DEVICE int first_to_come(Ranks o, int first, int each, int* polls) {
  int next = o.rank + 1 < o.world ? o.rank + 1 : 0, last = 2 * (first + (each - 1) * N_THREADS);
  const I4 *mine = (const I4*)place_in(o, o.rank, o.rank, last), *its = (const I4*)place_in(o, o.rank, next, last);
  for (; !any_lane(!*polls); --*polls) {  // the same for all lanes
    I4 a = read16(mine), b = read16(its);
    if (any_lane(has_come(o, a))) return o.rank;
    if (any_lane(has_come(o, b))) return next;
  }
  return o.rank;
}
// Those pairs of the sums over all ranks, in their order, into y (where the part that comes first is before: it is taken while others'
// kernels may still run). Called by whole warps.
DEVICE bool take_sums(Ranks o, float* y, int first, int n_pairs, int* polls) {
  float a[TAKEN_TOGETHER], b[TAKEN_TOGETHER], x[TAKEN_TOGETHER], z[TAKEN_TOGETHER];
  int each = imin((n_pairs - first + N_THREADS - 1) / N_THREADS, TAKEN_TOGETHER);
  F2* pairs = (F2*)y + first;
  int early = first_to_come(o, first, each, polls);
  bool lost = take(o, early, first, each, x, z, polls);
  UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++)
    if (k < each) pairs[k * N_THREADS].x = x[k], pairs[k * N_THREADS].y = z[k];
  for (int r = 0; r < o.world; r++) {
    if (r != early) {
      lost |= take(o, r, first, each, x, z, polls);
    } else {
      UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++) {
        F2 pair = pairs[k < each ? k * N_THREADS : 0];
        x[k] = pair.x, z[k] = pair.y;
      }
    }
    UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++) {
      a[k] = r ? a[k] + x[k] : x[k];
      b[k] = r ? b[k] + z[k] : z[k];
    }
  }
  UNROLL for (int k = 0; k < TAKEN_TOGETHER; k++)
    if (k < each) pairs[k * N_THREADS].x = a[k], pairs[k * N_THREADS].y = b[k];
  return lost;
}
