// Products of few short rows (N_IN values) that each block of threads rounds to Q8_0 itself, which saves a launch.
// Pair p takes matrix p % n_matrices and row p of x (x_stride elements, a multiple of 4). Blocks of threads past the last row round
// n_beside values of another array, of rows of beside_n, which this product has nothing to do with, to Q8_K: that saves a launch, too.
// The next kernel, which only reads weights and what was chosen long before, may then start early: this one is short.

KERNEL AT_MOST(BLOCK) JOIN(matvec_rounding_, TYPE)(const u8* w, const u16* d, const float* x, float* y, int n_out, int n_matrices,
                                                   long long x_stride, long long y_stride, const float* beside, s8* beside_q,
                                                   float* beside_d, short* beside_sums, int n_beside, int beside_n) {
  SHARED s8 q[N_IN];
  SHARED u16 q_d[N_IN / 32];
  int pair = BLOCK_Y, matrix = pair % n_matrices, row0 = BLOCK_X * BLOCK_ROWS, row = imin(row0 + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix m = {w, 0, d};
  m = FROM_ROW(m, (long long)matrix * n_out + row);
  W ring[RING];
  start_dots(ring, m, m, 1);
  if (beside) let_next_start();
  wait_for_inputs();
  if (row0 >= n_out) {
    int b = (BLOCK_X - (n_out + BLOCK_ROWS - 1) / BLOCK_ROWS) * (BLOCK / LANES) + WARP;
    if (b < n_beside / 256) {
      float value[PER_LANE];
      UNROLL for (int j = 0; j < PER_LANE; j++) value[j] = beside[(long long)b * 256 + LANE * PER_LANE + j];
      int in_row = b % (beside_n / 256), first = b - in_row;  // blocks
      store_q8_k(value, in_row, beside_q + first * 256, beside_d + first, beside_sums + first * 16);
    }
    return;
  }
  x += pair * x_stride;
  UNROLL for (int i0 = 0; i0 < N_IN; i0 += BLOCK * 8) {  // 4 lanes hold a block of 32
    int i = i0 + THREAD * 8;
    float value[8];
    UNROLL for (int j = 0; j < 8; j += 4) {
      F4 four = {0, 0, 0, 0};
      if (i < N_IN) four = *(const F4*)(x + i + j);
      value[j] = four.x, value[j + 1] = four.y, value[j + 2] = four.z, value[j + 3] = four.w;
    }
    int most = 0;
    UNROLL for (int j = 0; j < 8; j++) most = imax(most, magnitude(value[j]));
    float largest = largest_of(most, 4), inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
    if (i < N_IN) {
      I2 packed = {(int)pack4(value, inverse), (int)pack4(value + 4, inverse)};
      *(I2*)(q + i) = packed;
      if (i % 32 == 0) q_d[i / 32] = f32_to_f16(largest / 127.0f);
    }
  }
  barrier();
  float acc[ROWS];
  finish_dots(acc, ring, m, q, q_d, 0, 0, 1, 1);
  UNROLL for (int r = 0; r < ROWS; r++)
    if (THREAD % GROUP == 0 && row + r < n_out) y[pair * y_stride + row + r] = acc[r];
}
