// Inboxes: memory of a rank that the other ranks of its host write into (npglm/gpu/collective.py makes them).
//
// An inbox is I4 [2][world][capacity / 2], zeroed at the start: two values of a rank, each with the number of the call. A value
// has arrived when the number beside it is this call's: no other signal is needed. Calls use the two halves in turn. The half of
// the last but one call is free: who has got a rank's values of the last call knows that its kernel had begun, so the one before
// had ended. Every block of threads counts the calls itself, the same number on every rank. In the order of ranks: the same
// bits on all of them.
//
// A rank that is gone writes nothing. Who has looked MAX_POLLS times (about a minute) takes NaN for what is missing, which the next
// sampling turns into an error, and its block of threads does not wait again: its number of calls is LOST from then on.

#ifndef MAX_POLLS
#define MAX_POLLS (1 << 26)
#endif
#define LOST -1
#define NAN_BITS 0x7fffffff

typedef struct { const u64* inboxes; int call, capacity, rank, world; } Others;

DEVICE int next_call(int calls) { return calls == LOST ? LOST : (int)(((u32)calls + 1) & 0x7fffffff); }
DEVICE int polls_of(Others o) { return o.call == LOST ? 1 : MAX_POLLS; }
DEVICE bool has_come(Others o, I4 part) { return part.y == o.call && part.w == o.call && o.call != LOST; }

DEVICE I4* place_in(Others o, int inbox, int rank, int pair) {
  return (I4*)o.inboxes[inbox] + ((long long)(o.call & 1) * o.world + rank) * (o.capacity / 2) + pair;
}
// Values 2 * pair and 2 * pair + 1 of this rank to all the others.
DEVICE void give(Others o, int pair, float a, float b) {
  I4 mine = {(int)as_u32(a), o.call, (int)as_u32(b), o.call};
  for (int r = 0; r < o.world; r++)
    if (r != o.rank) write16(place_in(o, r, o.rank, pair), mine);
}
// Pairs first, first + N_THREADS, ... of the sums over all ranks, of which x is this one's part, into y. Reads are on their way together.
// *polls: how often they may be made. Returns whether any was in vain.
#define SUMMED_TOGETHER 12
DEVICE bool sum_up(Others o, const float* x, float* y, int first, int n_pairs, int* polls) {
  float a[SUMMED_TOGETHER], b[SUMMED_TOGETHER];
  bool lost = false;
  for (int r = 0; r < o.world; r++) {
    I4 part[SUMMED_TOGETHER];
    int missing = r != o.rank;
    UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++) {
      int pair = first + k * N_THREADS < n_pairs ? first + k * N_THREADS : first;
      if (r == o.rank) part[k].x = (int)as_u32(x[2 * pair]), part[k].z = (int)as_u32(x[2 * pair + 1]);
    }
    for (; missing && *polls; --*polls) {
      missing = 0;
      UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++)
        part[k] = read16(place_in(o, o.rank, r, first + k * N_THREADS < n_pairs ? first + k * N_THREADS : first));
      UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++) missing |= !has_come(o, part[k]);
    }
    if (missing) {  // all of these, whichever it was
      lost = true;
      UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++) part[k].x = part[k].z = NAN_BITS;
    }
    UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++) {
      a[k] = r ? a[k] + as_f32((u32)part[k].x) : as_f32((u32)part[k].x);
      b[k] = r ? b[k] + as_f32((u32)part[k].z) : as_f32((u32)part[k].z);
    }
  }
  UNROLL for (int k = 0; k < SUMMED_TOGETHER; k++) {
    int pair = first + k * N_THREADS;
    if (pair < n_pairs) y[2 * pair] = a[k], y[2 * pair + 1] = b[k];
  }
  return lost;
}
