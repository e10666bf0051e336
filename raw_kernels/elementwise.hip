// Sums, activations, norms, rope, and writing rows into the cache. One thread per value, or one block per row.

KERNEL add_f32(const float* x, const float* y, float* out, long long n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < n) out[i] = x[i] + y[i];
}
KERNEL scale_f32(const float* x, float* out, long long n, float factor) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < n) out[i] = x[i] * factor;
}
KERNEL sigmoid_f32(const float* x, float* out, long long n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < n) out[i] = 1.0f / (1.0f + expf(-x[i]));
}
KERNEL swiglu_f32(const float* gate, const float* up, float* out, long long n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < n) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}
KERNEL zero_i32(int* x, long long n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < n) x[i] = 0;
}

// One block per row of n values.
KERNEL rms_norm_f32(const float* x, const float* weight, float* y, int n, long long x_stride, long long y_stride, float eps) {
  wait_for_inputs();
  x += BLOCK_X * x_stride, y += BLOCK_X * y_stride;
  float sum = 0;
  for (int i = THREAD; i < n; i += N_THREADS) sum = fmaf(x[i], x[i], sum);
  float root = sqrtf(block_sum(sum) / (float)n + eps);
  for (int i = THREAD; i < n; i += N_THREADS) y[i] = x[i] / root * weight[i];
}
KERNEL layer_norm_f32(const float* x, const float* weight, const float* bias, float* y, int n, long long x_stride,
                      long long y_stride, float eps) {
  wait_for_inputs();
  x += BLOCK_X * x_stride, y += BLOCK_X * y_stride;
  float sum = 0;
  for (int i = THREAD; i < n; i += N_THREADS) sum += x[i];
  float mean = block_sum(sum) / (float)n;
  sum = 0;
  for (int i = THREAD; i < n; i += N_THREADS) sum = fmaf(x[i] - mean, x[i] - mean, sum);
  float root = sqrtf(block_sum(sum) / (float)n + eps);
  for (int i = THREAD; i < n; i += N_THREADS) y[i] = (x[i] - mean) / root * weight[i] + bias[i];
}

// cos, sin [T,n] of pos * frequency, in f64. round: f32, once
KERNEL rope_table_f32(const int* pos, const double* frequency, float* cosine, float* sine, int n_tokens, int n) {
  wait_for_inputs();
  int i = BLOCK_X * N_THREADS + THREAD;
  if (i >= n_tokens * n) return;
  double angle = (double)pos[i / n] * frequency[i % n];
  cosine[i] = (float)cos(angle);
  sine[i] = (float)sin(angle);
}
// x rows [T * heads] of 2n values -> y rows; pair i stays in place. x and y may be the same rows.
KERNEL rope_f32(const float* x, const float* cosine, const float* sine, float* y, int n_rows, int heads, int n,
                long long x_stride, long long y_stride) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i >= (long long)n_rows * n) return;
  long long row = i / n, k = i % n, angle = row / heads * n + k;
  float even = x[row * x_stride + 2 * k], odd = x[row * x_stride + 2 * k + 1];
  y[row * y_stride + 2 * k] = even * cosine[angle] - odd * sine[angle];
  y[row * y_stride + 2 * k + 1] = even * sine[angle] + odd * cosine[angle];
}

// The indexer's keys (cache_rows.hip) of x [T,n], into cache[pos[t]]. One block per token.
KERNEL index_key_f16(const float* x, const float* weight, const float* bias, const float* cosine, const float* sine, const int* pos,
                     u16* cache, int n, int n_pairs, float eps) {
  wait_for_inputs();
  int t = BLOCK_X;
  put_index_key(x + t * n, weight, bias, cosine + t * n_pairs, sine + t * n_pairs, cache + (long long)pos[t] * n, n, n_pairs, eps);
}

// cache[pos[t]] = rows[t]
KERNEL store_f32(const float* rows, const int* pos, float* cache, int n_tokens, int n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < (long long)n_tokens * n) cache[(long long)pos[i / n] * n + i % n] = rows[i];
}
KERNEL store_f16(const float* rows, const int* pos, u16* cache, int n_tokens, int n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < (long long)n_tokens * n) cache[(long long)pos[i / n] * n + i % n] = f32_to_f16(rows[i]);  // round: f16
}
