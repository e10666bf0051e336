// Products of few tokens with quantised weights (dots.hip): plain, per head and per expert.
//
// A pair is one row of activations with one matrix: pair p takes matrix experts[p] (-1: its result is zero), or p % n_matrices
// where experts is null, and row p / x_div of x. y[pair, row], y rows at y_stride elements. TOKENS pairs at once share a matrix
// (plain products only). Where q is given, y's Q8_0 blocks come with it: a block of threads makes whole ones (TOKENS 1). Where
// inboxes are given, y of one token is this rank's part of a sum, and goes there too (inbox.hip).

KERNEL AT_MOST(BLOCK) JOIN(matvec_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d, const short* sums,
                           const int* experts, float* y, s8* q, u16* y_d, int n_pairs, int n_out, int n_matrices, int x_div,
                           long long y_stride, const u64* inboxes, const int* calls, int capacity, int rank, int world) {
  SHARED float made[BLOCK_ROWS];
  int pair = BLOCK_Y * TOKENS, row0 = BLOCK_X * BLOCK_ROWS, row = imin(row0 + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix m = {w, scales, d};
  W ring[RING] = {};
  float acc[ROWS * TOKENS];
  if (experts) wait_for_inputs();
  long long matrix = experts ? experts[pair] : pair % n_matrices;
  m = FROM_ROW(m, matrix * n_out + row);
  if (matrix >= 0) start_dots(ring, m, m, 1);
  wait_for_inputs();
  Ranks ranks = {};
  if (inboxes) ranks = ranks_of(inboxes, calls, capacity, rank, world);
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = 0;
  if (matrix >= 0) finish_dots(acc, ring, m, x, x_d, sums, pair, n_pairs, x_div);
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) {
    int r = row + i / TOKENS, p = pair + i % TOKENS;
    if (THREAD % GROUP == 0 && r < n_out && p < n_pairs) y[p * y_stride + r] = acc[i];
    if (THREAD % GROUP == 0 && r < n_out && inboxes) give(ranks, r, acc[i]);
    if (THREAD % GROUP == 0 && TOKENS == 1) made[r - row0] = acc[i];
  }
  if (!q) return;
  barrier();
  long long at = (long long)pair * n_out + row0;
  store_made(made, imin(BLOCK_ROWS, n_out - row0), q + at, y_d + at / 32);
}
