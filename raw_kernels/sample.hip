// The next token id from one row of logits: best_logits_f32 with a block for each LOGITS of them, then one block.
// id -1: a logit is NaN, +inf, or all are -inf.
#define LOGITS 4096
#define BAD ~0ull  // instead of a rank: NaN, +inf

DEVICE u64 block_max_u64(u64 x) {
  SHARED u64 parts[MAX_WARPS];
  x = lane_max_u64(x);
  barrier();
  if (LANE == 0) parts[WARP] = x;
  barrier();
  for (int i = 0; i < N_THREADS / LANES; i++) x = parts[i] > x ? parts[i] : x;
  return x;
}
KERNEL best_logits_f32(const float* logits, u64* best, int n) {
  wait_for_inputs();
  u64 mine = 0;
  _Pragma("unroll 8") for (int i = BLOCK_X * LOGITS + THREAD; i < imin(BLOCK_X * LOGITS + LOGITS, n); i += N_THREADS) {
    u64 rank = ranked(logits[i], i);
    if (rank >> 32 == 0 || rank >> 32 == 0xff800000u) rank = BAD;
    mine = rank > mine ? rank : mine;
  }
  mine = block_max_u64(mine);
  if (THREAD == 0) best[BLOCK_X] = mine;
}
// Of the parts' best ones, 0 if the row cannot be sampled.
DEVICE u64 best_of(const u64* parts, int n_parts) {
  u64 best = 0;
  for (int i = THREAD; i < n_parts; i += N_THREADS) best = parts[i] > best ? parts[i] : best;
  best = block_max_u64(best);
  return best == BAD || best >> 32 == 0x007fffffu ? 0 : best;  // -inf
}
KERNEL greedy_f32(const u64* parts, int* id, int n_parts) {
  wait_for_inputs();
  u64 best = best_of(parts, n_parts);
  if (THREAD == 0) *id = best ? (int)~(u32)best : -1;
}

// Philox-4x64-10, key (seed, 0), counter (step + 1, 0, 0, 0); the top 24 bits of its first word (npglm/sampler.py: uniform).
DEVICE u64 philox24(u64 seed, u64 step) {
  u64 c0 = step + 1, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
  for (int round = 0; round < 10; round++) {
    u64 low0 = c0 * 0xD2E7470EE14C6C93ull, high0 = mul_high(c0, 0xD2E7470EE14C6C93ull);
    u64 low1 = c2 * 0xCA5A826395121157ull, high1 = mul_high(c2, 0xCA5A826395121157ull);
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
  }
  return c0 >> 40;
}
// Probability of a logit in units of 2^-44: integers, so that their sum has no order.
DEVICE u64 weight_of(float logit, float top, float temperature) {
  return (u64)(exp(((double)logit - (double)top) / (double)temperature) * 17592186044416.0);
}
// Candidates ordered by logit descending, then id; the first whose running sum of probabilities exceeds uniform * total.
// Found by radix on the sort key, 11, 11 and 10 bits (few logits share the first ones: sums of 64 bits in shared memory are slow
// where many threads add to one), then among equal logits by their number.
#define BINS 2048
KERNEL temperature_f32(const float* logits, const u64* parts, const long long* step, int* id, int n, int n_parts, float temperature,
                       u64 seed) {
  wait_for_inputs();
  SHARED u64 weight[BINS];
  SHARED u64 of_32[BINS / 32];  // sums of 32 bins
  SHARED u64 target;
  SHARED u32 prefix;
  u64 best = best_of(parts, n_parts);
  if (!best) {
    if (THREAD == 0) *id = -1;
    return;
  }
  float top = logits[(u32)~(u32)best];
  _Pragma("unroll 1") for (int pass = 0; pass < 3; pass++) {
    int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass == 2 ? 10 : 11;
    for (int i = THREAD; i < BINS; i += N_THREADS) weight[i] = 0;
    barrier();
    u32 high = pass == 0 ? 0 : prefix;
    for (int i = THREAD; i < n; i += N_THREADS) {
      u32 key = sort_key(logits[i]);
      if (pass && key >> (shift + bits) != high >> (shift + bits)) continue;
      u64 w = weight_of(logits[i], top, temperature);
      if (w) atomic_add_u64(&weight[key >> shift & ((1 << bits) - 1)], w);
    }
    barrier();
    if (THREAD < BINS / 32) {
      of_32[THREAD] = 0;
      _Pragma("unroll 4") for (int i = 0; i < 32; i++) of_32[THREAD] += weight[32 * THREAD + i];
    }
    barrier();
    if (THREAD == 0) {
      if (pass == 0) {
        u64 total = 0;
        _Pragma("unroll 4") for (int i = 0; i < BINS / 32; i++) total += of_32[i];
        target = mul_high(total, philox24(seed, (u64)*step) << 40);
      }
      int group = BINS / 32 - 1;
      while (of_32[group] <= target) target -= of_32[group--];
      int digit = 32 * group + 31;
      while (weight[digit] <= target) target -= weight[digit--];
      prefix = high | (u32)digit << shift;
    }
    barrier();
  }
  // Equal logits weigh the same: the one to take is number target / weight among them, by id.
  int seen = 0, total, wanted = (int)(target / weight_of(as_f32(prefix >> 31 ? prefix & 0x7fffffffu : ~prefix), top, temperature));
  for (int i0 = 0; i0 < n; i0 += N_THREADS) {
    int i = i0 + THREAD, equal = i < n && sort_key(logits[i]) == prefix;
    int at = seen + block_scan(equal, &total);
    if (equal && at == wanted) *id = i;
    seen += total;
  }
}

// The next step's inputs: the chosen id, its position, its number. An id of -1 leaves token 0 to run; the host sees the -1.
KERNEL next_step(const int* chosen, int* token, int* pos, long long* step) {
  wait_for_inputs();
  if (THREAD == 0) *token = imax(*chosen, 0), *pos += 1, *step += 1;
}
