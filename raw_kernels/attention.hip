// Attention over the latent cache: softmax(scale * q . row) over the rows that top_k names, values are a row's first RANK numbers.
// q f32 [T, H, WIDTH], cache [capacity, WIDTH], top_k int32 [T, n] (entries < 0 or > pos are padding; no other row is read).

#define WIDTH (RANK + ROPE)

// f32 cache: one block of 128 threads per token and head, one key a thread, a running softmax.
KERNEL attention_f32(const float* q, const float* cache, const int* top_k, const int* pos, float* out, int heads, int n,
                     float scale) {
  wait_for_inputs();
  SHARED float p[128];
  SHARED int row[128];
  int head = BLOCK_X, t = BLOCK_Y;
  q += ((long long)t * heads + head) * WIDTH;
  float acc[(RANK + 127) / 128], largest = MINUS_INFINITY, sum = 0;
  UNROLL for (int i = 0; i < (RANK + 127) / 128; i++) acc[i] = 0;
  for (int k0 = 0; k0 < n; k0 += 128) {
    int k = k0 + THREAD < n ? top_k[(long long)t * n + k0 + THREAD] : -1;
    bool valid = k >= 0 && k <= pos[t];
    float score = MINUS_INFINITY;
    if (valid) {
      score = 0;
      for (int i = 0; i < WIDTH; i++) score = fmaf(q[i], cache[(long long)k * WIDTH + i], score);
      score *= scale;
    }
    // NaN counts as infinity, so that it is not passed over: what comes of it is NaN.
    float higher = fmaxf(largest, block_max(score == score ? score : -MINUS_INFINITY));
    if (higher == MINUS_INFINITY) continue;  // nothing valid yet; the same for all threads
    float shrink = expf(largest - higher), weight = valid ? expf(score - higher) : 0.0f;
    largest = higher;
    p[THREAD] = weight, row[THREAD] = valid ? k : -1;
    sum = sum * shrink + block_sum(weight);
    UNROLL for (int i = 0; i < (RANK + 127) / 128; i++) {
      int r = i * 128 + THREAD;
      acc[i] *= shrink;
      if (r < RANK)
        for (int j = 0; j < 128; j++)
          if (row[j] >= 0) acc[i] = fmaf(p[j], cache[(long long)row[j] * WIDTH + r], acc[i]);
    }
    barrier();
  }
  UNROLL for (int i = 0; i < (RANK + 127) / 128; i++)
    if (i * 128 + THREAD < RANK) out[((long long)t * heads + head) * RANK + i * 128 + THREAD] = acc[i] / sum;
}

// The splits of one token and head put together, and where q is given the result's Q8_0 blocks. One value a thread.
KERNEL attention_merge_f32(const float* part, const float* part_ml, float* out, s8* q, u16* d, int heads, int splits) {
  SHARED float weight[MAX_SPLITS];
  int head = BLOCK_X, t = BLOCK_Y, r = BLOCK_Z * N_THREADS + THREAD;
  wait_for_inputs();
  long long first = (long long)t * splits * heads + head, stride = (long long)heads * RANK;  // split s is at first + s * heads
  part += first * RANK + imin(r, RANK - 1);
  float value[AHEAD];
  load_parts(part, stride, 0, splits, value);
  float sum = split_weights(part_ml + first * 2, heads, splits, weight);
  barrier();
  float total = merged(value, part, stride, splits, weight) / sum;
  u16 scale;
  int byte = q8_0_of(total, &scale);
  if (r >= RANK) return;
  long long at = ((long long)t * heads + head) * RANK + r;
  out[at] = total;
  if (q) q[at] = (s8)byte;
  if (q && r % 32 == 0) d[at / 32] = scale;
}
