// What one token adds to the caches, each made by a block of threads.

// The latent of one token, latent [rank + 2 * n]: the norm of kv's first `rank` values, then its last 2 * n turned in pairs
// (elementwise.hip); row, if there is one, gets it as f16.
DEVICE void put_latent(const float* kv, const float* weight, const float* cosine, const float* sine, float* latent, u16* row, int rank,
                       int n, float eps) {
  float sum = 0;
  for (int i = THREAD; i < rank; i += N_THREADS) sum = fmaf(kv[i], kv[i], sum);
  float root = sqrtf(block_sum(sum) / (float)rank + eps);
  for (int i = THREAD; i < rank; i += N_THREADS) {
    latent[i] = kv[i] / root * weight[i];
    if (row) row[i] = f32_to_f16(latent[i]);
  }
  for (int i = THREAD; i < n; i += N_THREADS) {
    float even = kv[rank + 2 * i], odd = kv[rank + 2 * i + 1], c = cosine[i], s = sine[i];
    latent[rank + 2 * i] = even * c - odd * s, latent[rank + 2 * i + 1] = even * s + odd * c;
    if (row)
      for (int j = rank + 2 * i; j < rank + 2 * i + 2; j++) row[j] = f32_to_f16(latent[j]);
  }
}

// The indexer's key, row [n]: LayerNorm of x [n], its first 2 * n_pairs values turned in pairs. At least one thread per value.
DEVICE void put_index_key(const float* x, const float* weight, const float* bias, const float* cosine, const float* sine, u16* row, int n,
                          int n_pairs, float eps) {
  int i = THREAD, at = i < n ? i : 0, pair = i < 2 * n_pairs ? i / 2 : 0;
  float value = x[at], mean = block_sum(i < n ? value : 0.0f) / (float)n, centred = i < n ? value - mean : 0.0f;
  float y = centred / sqrtf(block_sum(centred * centred) / (float)n + eps) * weight[at] + bias[at];
  float other = lane_read_f32(y, LANE ^ 1), c = cosine[pair], s = sine[pair];
  if (i < 2 * n_pairs) y = i & 1 ? other * s + y * c : y * c - other * s;
  if (i < n) row[i] = f32_to_f16(y);  // round: f16
}
