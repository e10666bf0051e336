// Sums over the ranks of one host without a library (inbox.hip). One thread for two values.

KERNEL exchange_sum_f32(const float* x, float* y, const u64* inboxes, int* calls, int n, int capacity, int rank, int world) {
  wait_for_inputs();
  Others o = {inboxes, next_call(calls[BLOCK_X]), capacity, rank, world};
  int pair = BLOCK_X * N_THREADS + THREAD, polls = polls_of(o);
  bool lost = false;
  if (2 * pair < n) {
    bool both = 2 * pair + 1 < n;
    float a = x[2 * pair], b = both ? x[2 * pair + 1] : 0.0f, first = 0, second = 0;
    give(o, pair, a, b);
    for (int r = 0; r < world; r++) {
      I4 part = {(int)as_u32(a), o.call, (int)as_u32(b), o.call};
      if (r != rank) {
        do part = read16(place_in(o, rank, r, pair));
        while (!has_come(o, part) && --polls > 0);
        if (!has_come(o, part)) lost = true, part.x = part.z = NAN_BITS;
      }
      first = r ? first + as_f32((u32)part.x) : as_f32((u32)part.x);
      second = r ? second + as_f32((u32)part.z) : as_f32((u32)part.z);
    }
    y[2 * pair] = first;
    if (both) y[2 * pair + 1] = second;
  }
  barrier();
  if (THREAD == 0) calls[BLOCK_X] = o.call;
  barrier();
  if (lost) calls[BLOCK_X] = LOST;
}
