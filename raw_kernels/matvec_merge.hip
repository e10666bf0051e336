// Products of few tokens' attention with a matrix of each head, which first puts its splits together (merge.hip, dots.hip): saves a
// launch. N_IN is the rank. y[pair, row] with its Q8_0 blocks, pair = token * heads + head.

KERNEL BOUNDS(BLOCK, 1) JOIN(matvec_merge_, TYPE)(const u8* w, const u16* d, const float* part, const float* part_ml, float* y, s8* q,
                                                  u16* y_d, int n_out, int heads, int splits) {
  SHARED float weight[MAX_SPLITS], made[BLOCK_ROWS];
  SHARED s8 x[N_IN];
  SHARED u16 x_d[N_IN / 32];
  int t = BLOCK_Y / heads, head = BLOCK_Y % heads, row0 = BLOCK_X * BLOCK_ROWS, row = imin(row0 + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix m = {w, 0, d};
  m = FROM_ROW(m, (long long)head * n_out + row);
  W ring[RING];
  start_dots(ring, m, m, 1);
  wait_for_inputs();
  long long first = (long long)t * splits * heads + head, stride = (long long)heads * N_IN;  // split s is at first + s * heads
  float sum = 0;
  for (int i0 = 0; i0 < N_IN; i0 += BLOCK) {
    int r = imin(i0 + THREAD, N_IN - 1);
    float value[AHEAD];
    load_parts(part + first * N_IN + r, stride, 0, splits, value);
    if (i0 == 0) sum = split_weights(part_ml + first * 2, heads, splits, weight);
    barrier();
    u16 scale;
    int byte = q8_0_of(merged(value, part + first * N_IN + r, stride, splits, weight) / sum, &scale);
    if (i0 + THREAD < N_IN) x[r] = (s8)byte;
    if (i0 + THREAD < N_IN && r % 32 == 0) x_d[r / 32] = scale;
  }
  barrier();
  float acc[ROWS];
  finish_dots(acc, ring, m, x, x_d, 0, 0, 1, 1);
  long long at = (long long)BLOCK_Y * n_out;
  UNROLL for (int i = 0; i < ROWS; i++)
    if (THREAD % GROUP == 0) {
      made[row + i - row0] = acc[i];
      if (row + i < n_out) y[at + row + i] = acc[i];
    }
  barrier();
  store_made(made, imin(BLOCK_ROWS, n_out - row0), q + at + row0, y_d + (at + row0) / 32);
}
