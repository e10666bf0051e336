// A few rows of f32 weights (the router): one block per output value. n_in is a multiple of 4.

KERNEL matvec_f32_f32(const float* w, const float* x, float* y, int n_in, int n_out) {
  const F4* row = (const F4*)(w + (long long)BLOCK_X * n_in);
  const F4* in = (const F4*)(x + (long long)BLOCK_Y * n_in);
  float sum = 0;
  _Pragma("unroll 8") for (int i = THREAD; i < n_in / 4; i += N_THREADS) {
    F4 a = row[i], b = in[i];
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }
  sum = block_sum(sum);
  if (THREAD == 0) y[(long long)BLOCK_Y * n_out + BLOCK_X] = sum;
}
