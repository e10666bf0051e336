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
// A thread's part of a row: its first EACH reads of x, and of the 256 values that its warp makes first x, what is added to it, and the
// weight. x is read before the kernel waits for its inputs, where the kernel before has not written it (settled), and from memory: a
// first-level cache may hold what was there before.
typedef struct { F4 x[EACH], mine[PER_LANE / 4], add[PER_LANE / 4], gain[PER_LANE / 4]; } Ahead;
#define MINE (BLOCK_Y + parts * WARP)  // the number of these 256 values
DEVICE void read_gain(Ahead* a, const float* weight, int n, int parts) {
  UNROLL for (int j = 0; j < PER_LANE / 4; j++) a->gain[j] = four_at(weight, MINE * 256 + LANE * PER_LANE + 4 * j, n);
}
DEVICE F4 four_early(const float* x, int i, int n) {
  I4 bits = {0, 0, 0, 0};
  if (i < n) bits = read16((const I4*)(x + i));
  F4 four = {as_f32((u32)bits.x), as_f32((u32)bits.y), as_f32((u32)bits.z), as_f32((u32)bits.w)};
  return four;
}
DEVICE void read_x(Ahead* a, const float* x, int n, int parts) {
  UNROLL for (int j = 0; j < EACH; j++) a->x[j] = four_early(x, 4 * THREAD + j * 4 * N_THREADS, n);
  UNROLL for (int j = 0; j < PER_LANE / 4; j++) a->mine[j] = four_early(x, MINE * 256 + LANE * PER_LANE + 4 * j, n);
}
// The root of the mean square of x, to which `plus` is added where it is given.
DEVICE float norm_root(Ahead* a, const float* x, const float* plus, int n, float eps, int parts) {
  float sum = 0;
  UNROLL for (int j = 0; j < PER_LANE / 4; j++) a->add[j] = four_at(plus, MINE * 256 + LANE * PER_LANE + 4 * j, plus ? n : 0);
  for (int i0 = 4 * THREAD; i0 < n; i0 += EACH * 4 * N_THREADS) {
    F4 v[EACH], p[EACH];
    UNROLL for (int j = 0; j < EACH; j++) {
      int i = i0 + j * 4 * N_THREADS;
      v[j] = a->x[j];
      if (i0 >= EACH * 4 * N_THREADS) v[j] = four_early(x, i, n);
      p[j] = four_at(plus, i, plus ? n : 0);
    }
    UNROLL for (int j = 0; j < EACH; j++) {
      if (plus) v[j] = sum_of(v[j], p[j]);
      sum = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, fmaf(v[j].z, v[j].z, fmaf(v[j].w, v[j].w, sum))));
    }
  }
  return sqrtf(block_sum(sum) / (float)n + eps);
}
// The normed row, and where there is `plus` its sum with x into total.
DEVICE void put_blocks(Ahead* ahead, float root, const float* x, const float* plus, float* total, const float* weight, float* y, s8* q,
                       u16* d, s8* q_k, float* d_k, short* sums, int n, int parts) {
  for (int b = MINE; b < n / 256; b += parts * (N_THREADS / LANES)) {
    float value[PER_LANE];
    int first = b * 256 + LANE * PER_LANE;
    UNROLL for (int j = 0; j < PER_LANE; j += 4) {
      F4 a = ahead->mine[j / 4], w = ahead->gain[j / 4], p = ahead->add[j / 4];
      if (b != MINE) {
        a = four_at(x, first + j, n), w = four_at(weight, first + j, n);
        p = four_at(plus, first + j, plus ? n : 0);
      }
      if (plus) {
        a = sum_of(a, p);
        *(F4*)(total + first + j) = a;
      }
      F4 made = {a.x / root * w.x, a.y / root * w.y, a.z / root * w.z, a.w / root * w.w};
      *(F4*)(y + first + j) = made;
      value[j] = made.x, value[j + 1] = made.y, value[j + 2] = made.z, value[j + 3] = made.w;
    }
    store_q8_0(value, q + b * 256, d + b * 8);
    store_q8_k(value, b, q_k, d_k, sums);
  }
}
KERNEL AT_MOST(256) rms_norm_blocks_f32(const float* x, const float* plus, float* total, const float* weight, float* y, s8* q, u16* d,
                                        s8* q_k, float* d_k, short* sums, int n, float eps, int parts, int settled) {
  Ahead ahead;
  long long row = (long long)BLOCK_X * n;
  read_gain(&ahead, weight, n, parts);
  if (!settled) wait_for_inputs();
  read_x(&ahead, x + row, n, parts);
  wait_for_inputs();
  if (plus) plus += row, total += row;
  float root = norm_root(&ahead, x + row, plus, n, eps, parts);
  put_blocks(&ahead, root, x + row, plus, total, weight, y + row, q + row, d + row / 32, q_k + row, d_k + row / 256, sums + row / 16, n,
             parts);
}
// The same of one row, where `plus` is the sum of what the ranks' kernels before have put into the inboxes (inbox.hip): the
// part that comes first is taken while the kernels of others still run.
KERNEL AT_MOST(256) sum_rms_norm_blocks_f32(const float* x, float* total, const float* weight, float* y, s8* q, u16* d, s8* q_k,
                                            float* d_k, short* sums, const u64* inboxes, int* calls, int n, float eps, int parts,
                                            int capacity, int rank, int world, int settled) {
  DYNAMIC_SHARED(memory);
  Ahead ahead;
  float* plus = (float*)memory;  // [n]
  let_next_start();
  read_gain(&ahead, weight, n, parts);
  if (!settled) wait_for_inputs();
  read_x(&ahead, x, n, parts);
  Ranks o = ranks_of(inboxes, calls + BLOCK_Y, capacity, rank, world);
  int polls = polls_of(o);
  bool lost = false;
  for (int first = THREAD; first < n / 2; first += TAKEN_TOGETHER * N_THREADS) lost |= take_sums(o, plus, first, n / 2, &polls);
  barrier();
  float root = norm_root(&ahead, x, plus, n, eps, parts);
  wait_for_inputs();
  put_blocks(&ahead, root, x, plus, total, weight, y, q, d, q_k, d_k, sums, n, parts);
  if (THREAD == 0) calls[BLOCK_Y] = o.call;  // which all have read before the barrier
  barrier();
  if (lost) calls[BLOCK_Y] = LOST;
}

// What follows the first products of latent attention. BLOCK_Y < parts: y and its blocks, the norm of x [T,n]. BLOCK_Y == parts:
// the latent of kv (cache_rows.hip); where there is a cache, its row pos[t] gets it too.
KERNEL AT_MOST(256) latent_norms_f32(const float* x, const float* weight, float* y, s8* q, u16* d, s8* q_k, float* d_k, short* sums,
                                     int n, const float* kv, const float* kv_weight, const float* cosine, const float* sine,
                                     float* latent, const int* pos, u16* cache, int rank, int n_pairs, float eps, int parts) {
  Ahead ahead;
  long long row = (long long)BLOCK_X * n;
  read_gain(&ahead, weight, n, parts);
  wait_for_inputs();
  if (BLOCK_Y < parts) {
    read_x(&ahead, x + row, n, parts);
    float root = norm_root(&ahead, x + row, 0, n, eps, parts);
    put_blocks(&ahead, root, x + row, 0, 0, weight, y + row, q + row, d + row / 32, q_k + row, d_k + row / 256, sums + row / 16, n, parts);
    return;
  }
  int t = BLOCK_X, width = rank + 2 * n_pairs;
  put_latent(kv + (long long)t * width, kv_weight, cosine + t * n_pairs, sine + t * n_pairs, latent + (long long)t * width,
             cache ? cache + (long long)pos[t] * width : 0, rank, n_pairs, eps);
}
