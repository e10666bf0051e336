// RMSNorm of rows of n = 256 * k values together with the 8-bit blocks of what comes out, which products will ask for. `parts`
// blocks of threads per row: each sums up the whole row, and makes the results of every parts-th 256 values, a warp 256 at a time.

#define EACH 6  // reads of a thread that are on their way together
// Values i..i + 3 of n, zeros past the end.
DEVICE F4 four_at(const float* x, int i, int n) {
  F4 zero = {0, 0, 0, 0};
  return i < n ? *(const F4*)(x + i) : zero;
}
DEVICE F4 sum_of(F4 a, F4 b) {
  F4 sum = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  return sum;
}
// The weights of the 256 values that this warp will make first: on their way before the kernel waits for its inputs.
typedef struct { F4 four[PER_LANE / 4]; } Gain;
DEVICE Gain gain_of(const float* weight, int n, int b) {
  Gain gain;
  UNROLL for (int j = 0; j < PER_LANE / 4; j++) gain.four[j] = four_at(weight, b * 256 + LANE * PER_LANE + 4 * j, n);
  return gain;
}
// Where there is `plus`, its row is added first and total gets the sum. gain: of 256 values number part + parts * WARP.
DEVICE void norm_blocks(const float* x, const float* plus, float* total, const float* weight, Gain gain, float* y, s8* q, u16* d,
                        s8* q_k, float* d_k, short* sums, int n, float eps, int part, int parts) {
  long long row = (long long)BLOCK_X * n;
  x += row, plus = plus ? plus + row : 0;
  float sum = 0;
  for (int i0 = 4 * THREAD; i0 < n; i0 += EACH * 4 * N_THREADS) {
    F4 a[EACH], p[EACH];
    UNROLL for (int j = 0; j < EACH; j++) {
      a[j] = four_at(x, i0 + j * 4 * N_THREADS, n);
      p[j] = four_at(plus, i0 + j * 4 * N_THREADS, plus ? n : 0);
    }
    UNROLL for (int j = 0; j < EACH; j++) {
      if (plus) a[j] = sum_of(a[j], p[j]);
      sum = fmaf(a[j].x, a[j].x, fmaf(a[j].y, a[j].y, fmaf(a[j].z, a[j].z, fmaf(a[j].w, a[j].w, sum))));
    }
  }
  float root = sqrtf(block_sum(sum) / (float)n + eps);
  for (int b = part + parts * WARP; b < n / 256; b += parts * (N_THREADS / LANES)) {
    float value[PER_LANE];
    int first = b * 256 + LANE * PER_LANE;
    if (b != part + parts * WARP) gain = gain_of(weight, n, b);
    UNROLL for (int j = 0; j < PER_LANE; j += 4) {
      F4 a = four_at(x, first + j, n), w = gain.four[j / 4];
      if (plus) {
        a = sum_of(a, four_at(plus, first + j, n));
        *(F4*)(total + row + first + j) = a;
      }
      F4 made = {a.x / root * w.x, a.y / root * w.y, a.z / root * w.z, a.w / root * w.w};
      *(F4*)(y + row + first + j) = made;
      value[j] = made.x, value[j + 1] = made.y, value[j + 2] = made.z, value[j + 3] = made.w;
    }
    store_q8_0(value, q + row + b * 256, d + row / 32 + b * 8);
    store_q8_k(value, q_k + row + b * 256, d_k + row / 256 + b, sums + row / 16 + b * 16);
  }
}
KERNEL rms_norm_blocks_f32(const float* x, const float* plus, float* total, const float* weight, float* y, s8* q, u16* d, s8* q_k,
                           float* d_k, short* sums, int n, float eps, int parts) {
  Gain gain = gain_of(weight, n, BLOCK_Y + parts * WARP);
  wait_for_inputs();
  norm_blocks(x, plus, total, weight, gain, y, q, d, q_k, d_k, sums, n, eps, BLOCK_Y, parts);
}
// The same of one row, of which `plus` is this rank's part of a sum over the ranks.
KERNEL AT_MOST(256) sum_rms_norm_blocks_f32(const float* x, const float* plus, float* total, const float* weight, float* y, s8* q, u16* d,
                               s8* q_k, float* d_k, short* sums, const u64* inboxes, int* calls, int n, float eps, int parts,
                               int capacity, int rank, int world) {
  DYNAMIC_SHARED(memory);
  float* whole = (float*)memory;  // [n]
  Gain gain = gain_of(weight, n, BLOCK_Y + parts * WARP);
  wait_for_inputs();
  Others o = {inboxes, next_call(calls[BLOCK_Y]), capacity, rank, world};
  for (int i = 256 * BLOCK_Y + 2 * THREAD; THREAD < 128 && i < n; i += 256 * parts) give(o, i / 2, plus[i], plus[i + 1]);
  int polls = polls_of(o);
  bool lost = false;
  for (int first = THREAD; first < n / 2; first += SUMMED_TOGETHER * N_THREADS) lost |= sum_up(o, plus, whole, first, n / 2, &polls);
  barrier();
  norm_blocks(x, whole, total, weight, gain, y, q, d, q_k, d_k, sums, n, eps, BLOCK_Y, parts);
  if (THREAD == 0) calls[BLOCK_Y] = o.call;  // which all have read before the barrier
  barrier();
  if (lost) calls[BLOCK_Y] = LOST;
}

// What follows the first products of latent attention. BLOCK_Y < parts: y and its blocks, the norm of x [T,n]. BLOCK_Y == parts:
// latent [T,rank + 2 * n_pairs], the norm of kv's first `rank` values, then its last 2 * n_pairs turned in pairs (elementwise.hip).
KERNEL latent_norms_f32(const float* x, const float* weight, float* y, s8* q, u16* d, s8* q_k, float* d_k, short* sums, int n,
                        const float* kv, const float* kv_weight, const float* cosine, const float* sine, float* latent, int rank,
                        int n_pairs, float eps, int parts) {
  bool is_latent = BLOCK_Y == parts;
  Gain gain = gain_of(weight, is_latent ? 0 : n, BLOCK_Y + parts * WARP);
  float kv_gain = is_latent && THREAD < rank ? kv_weight[THREAD] : 0.0f;
  wait_for_inputs();
  if (!is_latent) {
    norm_blocks(x, 0, 0, weight, gain, y, q, d, q_k, d_k, sums, n, eps, BLOCK_Y, parts);
    return;
  }
  long long row = (long long)BLOCK_X * (rank + 2 * n_pairs);
  kv += row, latent += row;
  float sum = 0;
  for (int i = THREAD; i < rank; i += N_THREADS) sum = fmaf(kv[i], kv[i], sum);
  float root = sqrtf(block_sum(sum) / (float)rank + eps);
  for (int i = THREAD; i < rank; i += N_THREADS) latent[i] = kv[i] / root * (i == THREAD ? kv_gain : kv_weight[i]);
  for (int i = THREAD; i < n_pairs; i += N_THREADS) {
    float even = kv[rank + 2 * i], odd = kv[rank + 2 * i + 1], c = cosine[BLOCK_X * n_pairs + i], s = sine[BLOCK_X * n_pairs + i];
    latent[rank + 2 * i] = even * c - odd * s;
    latent[rank + 2 * i + 1] = even * s + odd * c;
  }
}
