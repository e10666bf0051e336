// Activations rounded to ggml's 8-bit blocks (blocks.hip), and the same roundings written back as f32 for weights that are decoded
// in f32. x rows may be strided (x_stride elements); outputs are dense.

// The value of this thread, 0 past the end, where *i becomes -1.
DEVICE float value_of(const float* x, long long x_stride, int n_rows, int n, long long* i) {
  *i = (long long)BLOCK_X * N_THREADS + THREAD;
  bool inside = *i < (long long)n_rows * n;
  float value = inside ? x[*i / n * x_stride + *i % n] : 0.0f;
  if (!inside) *i = -1;
  return value;
}
// 8 neighbouring lanes share a block of 32 values.
KERNEL quantize_q8_0(const float* x, s8* q, u16* d, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  int b = BLOCK_X * (N_THREADS / 8) + THREAD / 8, per_row = n / 32, first = THREAD % 8 * 4, most = 0;
  bool inside = b < n_rows * per_row;
  float value[4] = {0, 0, 0, 0};
  if (inside) {
    const float* from = x + b / per_row * x_stride + b % per_row * 32 + first;
    if ((((u64)x >> 2 | (u64)x_stride) & 3) == 0) {
      F4 four = *(const F4*)from;
      value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
    } else {
      UNROLL for (int j = 0; j < 4; j++) value[j] = from[j];
    }
  }
  UNROLL for (int j = 0; j < 4; j++) most = imax(most, magnitude(value[j]));
  float largest = largest_of(most, 8);
  if (!inside) return;
  *(u32*)(q + (long long)b * 32 + first) = pack4(value, largest != 0.0f ? 127.0f / largest : 0.0f);
  if (first == 0) d[b] = f32_to_f16(largest / 127.0f);
}
KERNEL round_q8_0_f32(const float* x, float* y, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  long long i;
  u16 scale;
  int value = q8_0_of(value_of(x, x_stride, n_rows, n, &i), &scale);
  if (i >= 0) y[i] = (float)value * f16_to_f32(scale);
}

// One warp per block of 256 values. Returns the block's number, or -1 past the last one (for the whole warp).
DEVICE long long load_block(const float* x, int n_rows, int n, long long x_stride, float* values) {
  long long b = (long long)BLOCK_X * (N_THREADS / LANES) + WARP, per_row = n / 256;
  if (b >= n_rows * per_row) return -1;
  x += b / per_row * x_stride + b % per_row * 256 + LANE * PER_LANE;
  UNROLL for (int j = 0; j < PER_LANE; j++) values[j] = x[j];
  return b;
}
KERNEL quantize_q8_k(const float* x, s8* q, float* d, short* sums, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  float values[PER_LANE];
  long long b = load_block(x, n_rows, n, x_stride, values);
  long long row = b / (n / 256);
  if (b >= 0) store_q8_k(values, (int)(b % (n / 256)), q + row * n, d + row * (n / 256), sums + row * (n / 16));
}
KERNEL round_q8_k_f32(const float* x, float* y, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  float values[PER_LANE];
  long long b = load_block(x, n_rows, n, x_stride, values);
  if (b < 0) return;
  float scale, factor = q8_k_factor(values, &scale);
  UNROLL for (int j = 0; j < PER_LANE; j++)
    y[b * 256 + LANE * PER_LANE + j] = (float)imin((int)rintf(values[j] * factor), 127) * scale;
}

DEVICE float round_bf16(float x) {
  u32 u = as_u32(x);
  return x - x == 0.0f ? as_f32((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u) : x;
}
KERNEL round_bf16_f32(const float* x, float* y, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < (long long)n_rows * n) y[i] = round_bf16(x[i / n * x_stride + i % n]);
}
KERNEL round_f16_f32(const float* x, float* y, int n_rows, int n, long long x_stride) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i < (long long)n_rows * n) y[i] = f16_to_f32(f32_to_f16(x[i / n * x_stride + i % n]));
}
