// A few rows of f32 weights (the router): one block per output value. n_in is a multiple of 4.

#define EARLY 8  // reads of each thread that are on their way before the inputs are there

// pending [T, n_pending], if there is one, becomes NOT_YET.
KERNEL matvec_f32_f32(const float* w, const float* x, float* y, int n_in, int n_out, int* pending, int n_pending) {
  const F4* row = (const F4*)(w + (long long)BLOCK_X * n_in);
  F4 early[EARLY];
  UNROLL for (int j = 0; j < EARLY; j++) early[j] = row[imin(THREAD + j * N_THREADS, n_in / 4 - 1)];
  wait_for_inputs();
  const F4* in = (const F4*)(x + (long long)BLOCK_Y * n_in);
  float sum = 0;
  UNROLL for (int j = 0; j < EARLY; j++) {
    int i = THREAD + j * N_THREADS;
    F4 a = early[j];
    if (i < n_in / 4) {
      F4 b = in[i];
      sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    }
  }
  for (int i = THREAD + EARLY * N_THREADS; i < n_in / 4; i += N_THREADS) {
    F4 a = row[i], b = in[i];
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }
  sum = block_sum(sum);
  if (pending && BLOCK_X == 0 && THREAD < n_pending) pending[(long long)BLOCK_Y * n_pending + THREAD] = NOT_YET;
  if (THREAD == 0) y[(long long)BLOCK_Y * n_out + BLOCK_X] = sum;
}
