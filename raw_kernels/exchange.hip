// Sums over the ranks of one host without a library (inbox.hip). One thread for a value, of which x has n_mine from `first` on: the others
// of this rank are 0.

KERNEL exchange_sum_f32(const float* x, float* y, const u64* inboxes, int* calls, int n, int first, int n_mine, int capacity, int rank,
                        int world) {
  wait_for_inputs();
  Ranks o = ranks_of(inboxes, calls + BLOCK_X, capacity, rank, world);
  int i = BLOCK_X * N_THREADS + THREAD, polls = polls_of(o);
  bool lost = false;
  if (i < n) {
    float sum = 0;
    give(o, i, i >= first && i < first + n_mine ? x[i - first] : 0.0f);
    for (int r = 0; r < world; r++) {
      u64 word;
      do word = *place_in(o, rank, r, i);
      while ((int)(word >> 32) != o.call && --polls > 0);
      bool missing = (int)(word >> 32) != o.call || o.call == LOST;
      float part = as_f32(missing ? NAN_BITS : (u32)word);
      sum = r ? sum + part : part;
      lost |= missing;
    }
    y[i] = sum;
  }
  barrier();
  if (THREAD == 0) calls[BLOCK_X] = o.call;
  barrier();
  if (lost) calls[BLOCK_X] = LOST;
}
