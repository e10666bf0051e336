// chosen[t] = the k best of score[t, 0..pos[t]], ascending, then -1. Radix select: 3 passes of 11, 11 and 10 bits find the key of the
// last one chosen and how many of its equals are taken. One block of 1024 threads per token; nothing after pos is read.

#define BINS 2048
#define EACH 4  // neighbouring scores that one thread takes at a time

KERNEL select_top_k_f32(const float* score, const int* pos, int* chosen, long long score_stride, int k) {
  SHARED int count[BINS];
  SHARED u32 prefix;
  SHARED int wanted;
  int t = BLOCK_X, n = pos[t] + 1, total;
  const float* row = score + t * score_stride;
  chosen += (long long)t * k;
  u32 threshold = 0;  // all keys above it are chosen, and `equals` of those equal to it; NaN has key 0
  int equals = 0;
  bool all = n <= k;
  for (int shift = 21, bits = 11; !all && bits; bits = shift == 0 ? 0 : shift == 10 ? 10 : 11, shift = shift == 21 ? 10 : 0) {
    for (int i = THREAD; i < BINS; i += N_THREADS) count[i] = 0;
    barrier();
    _Pragma("unroll 4") for (int i = THREAD; i < n; i += N_THREADS) {
      u32 key = sort_key(row[i]);
      if (key && (shift == 21 || key >> (shift + bits) == threshold >> (shift + bits)))
        atomic_add(&count[key >> shift & ((1 << bits) - 1)], 1);
    }
    barrier();
    int left = shift == 21 ? k : equals, high = BINS - 1 - 2 * THREAD;  // this thread's bins: high and high - 1
    int in_high = count[high], in_both = in_high + count[high - 1], above = block_scan(in_both, &total);
    all = shift == 21 && total <= k;
    if (above < left && above + in_both >= left) {
      bool upper = above + in_high >= left;
      prefix = threshold | (u32)(upper ? high : high - 1) << shift;
      wanted = left - above - (upper ? 0 : in_high);
    }
    barrier();
    if (!all) threshold = prefix, equals = wanted;
  }

  int done = 0, equals_seen = 0;
  for (int i0 = 0; i0 < n; i0 += EACH * N_THREADS) {
    u32 key[EACH];
    int mine = 0, sums;  // more << 0, equal << 16: both counts at once
    UNROLL for (int j = 0; j < EACH; j++) {
      int i = i0 + EACH * THREAD + j;
      key[j] = i < n ? sort_key(row[i]) : 0;
      mine += key[j] > threshold ? 1 : key[j] == threshold && key[j] ? 1 << 16 : 0;
    }
    int before = block_scan(mine, &sums);
    int more_before = done + (before & 0xffff), equal_before = equals_seen + (before >> 16), taken_before = imin(equals_seen, equals);
    UNROLL for (int j = 0; j < EACH; j++) {
      int at = more_before + imin(equal_before, equals) - taken_before;
      bool more = key[j] > threshold, equal = key[j] == threshold && key[j];
      if (more || (equal && equal_before < equals)) chosen[at] = i0 + EACH * THREAD + j;
      more_before += more, equal_before += equal;
    }
    done += (sums & 0xffff) + imin(equals_seen + (sums >> 16), equals) - taken_before;
    equals_seen += sums >> 16;
  }
  for (int i = done + THREAD; i < k; i += N_THREADS) chosen[i] = -1;
}
