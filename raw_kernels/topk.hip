// chosen[t] = the k best of score[t, 0..pos[t]], ascending, then -1; nothing after pos is read. Radix select: 3 passes of 11, 11 and
// 10 bits find the key of the last one chosen and how many of its equals are taken. Blocks of THREADS threads: one per token, or for
// long rows one per token and CHUNK scores: top_k_count three times, top_k_tally, top_k_place.

#define EACH 16  // neighbouring scores of which a thread has the keys at a time, at most
#define CHUNK 4096
#define BINS 2048
#define COARSE (BINS / 32)  // bins of 32 bins
#define COUNTS (BINS + COARSE)

// All keys above the threshold are chosen, and `equals` of those equal to it; NaN has key 0. known: the bits of the threshold that are
// found. done: no pass can change it.
typedef struct { u32 threshold, known; int equals; bool done; } Cut;

// The keys of row[first..first + each), 0 from n on; each is a multiple of 4.
DEVICE void load_keys(const float* row, int first, int n, int each, u32* key) {
  float x[EACH];
  int left = imin(each, n - first), whole = (u64)row % 16 == 0 ? left / 4 * 4 : 0;
  UNROLL for (int j = 0; j < EACH; j += 4) {
    F4 four = {0, 0, 0, 0};
    if (j < whole) four = *(const F4*)(row + first + j);
    x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
  }
  if (whole < left)
    UNROLL for (int j = 0; j < EACH; j++)
      if (j >= whole && j < left) x[j] = row[first + j];
  UNROLL for (int j = 0; j < EACH; j++) key[j] = j < left ? sort_key(x[j]) : 0;
}

DEVICE int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
// Into count [COUNTS], the largest digit first.
DEVICE void count_digit(int* count, u32 key, int pass) {
  int bin = ~key >> shift_of(pass) & (pass == 2 ? BINS / 2 - 1 : BINS - 1);
  atomic_add(&count[bin], 1), atomic_add(&count[BINS + bin / 32], 1);
}
DEVICE int lowest(u32 bits) { return bit_count((bits & -bits) - 1); }
// Of the `left` keys of row[first..] those that are still to be told apart: in the first pass all, also keys 0, alone in the last bin.
DEVICE void count_digits(int* count, const u32* key, const float* row, int first, int left, int pass, Cut cut) {
  u32 bits = 0;
  if (pass == 0)
    UNROLL for (int j = 0; j < EACH; j++) {
      if (j % 4 == 0 && j >= left) break;
      count_digit(count, key[j], 0);
    }
  else
    UNROLL for (int j = 0; j < EACH; j++) bits |= (u32)!((key[j] ^ cut.threshold) & cut.known) << j;
  for (; bits; bits &= bits - 1) count_digit(count, sort_key(row[first + lowest(bits)]), pass);
}
// Sum over this lane and those before.
DEVICE int lane_scan(int x) {
  for (int step = 1; step < LANES; step *= 2) {
    int left = lane_read(x, LANE >= step ? LANE - step : LANE);
    if (LANE >= step) x += left;
  }
  return x;
}
// The cut after a pass, whose digits are counted. Every warp finds it.
DEVICE Cut refined(Cut cut, const int* count, int pass, int k) {
  int left = pass ? cut.equals : k, coarse[COARSE / LANES], sum = 0;
  UNROLL for (int i = 0; i < COARSE / LANES; i++) sum += coarse[i] = count[BINS + LANE * (COARSE / LANES) + i];
  int sums = lane_scan(sum), total = lane_read(sums, LANES - 1) - count[BINS - 1];
  if (pass == 0 && total <= k) {  // keys 0 left out
    cut.done = true;
    return cut;
  }
  int lane = lanes_with(sums < left), bin = lane * (COARSE / LANES);  // the first lane whose sum reaches what is left
  left -= lane_read(sums - sum, lane);
  UNROLL for (int i = 0; i < COARSE / LANES - 1; i++) {
    int in = lane_read(coarse[i], lane);
    if (left > in) left -= in, bin++;
  }
  int fine = LANE < 32 ? count[bin * 32 + LANE] : 0;
  sums = lane_scan(fine), lane = lanes_with(sums < left), bin = bin * 32 + lane;
  left -= lane_read(sums - fine, lane);
  cut.threshold |= (u32)(~bin & (pass == 2 ? BINS / 2 - 1 : BINS - 1)) << shift_of(pass);
  cut.known = ~0u << shift_of(pass), cut.equals = left;
  if (cut.threshold && left == lane_read(fine, lane)) cut.threshold--, cut.equals = 0, cut.done = true;  // all that begin like this
  return cut;
}
DEVICE Cut no_cut(int n, int k) {
  Cut cut = {0, 0, 0, n <= k};
  return cut;
}

// Which of a thread's keys are above the cut, and which are equal to it.
DEVICE u32 bits_above(const u32* key, Cut cut) {
  u32 bits = 0;
  UNROLL for (int j = 0; j < EACH; j++) bits |= (u32)(key[j] > cut.threshold) << j;
  return bits;
}
DEVICE u32 bits_equal(const u32* key, Cut cut) {
  u32 bits = 0;
  UNROLL for (int j = 0; j < EACH; j++) bits |= (u32)(key[j] == cut.threshold) << j;
  return bits;
}
// The chosen among the keys of row[first..] go to their places, *done of which are filled; *equal equals have been seen.
DEVICE void place(const u32* key, int first, Cut cut, int* chosen, int* done, int* equal) {
  u32 bits = bits_above(key, cut);
  int total;
  if (cut.equals) {
    u32 same = bits_equal(key, cut);
    int before = *equal + block_scan(bit_count(same), &total);
    for (; same && before < cut.equals; same &= same - 1, before++) bits |= same & -same;
    *equal += total;
  }
  int at = *done + block_scan(bit_count(bits), &total);
  for (; bits; bits &= bits - 1) chosen[at++] = first + lowest(bits);
  *done += total;
}
DEVICE void clear(int* count, int n) {
  for (int i = THREAD; i < n; i += THREADS) count[i] = 0;
}

// settled: the kernel before this one has not written pos. Of a row of at most EACH * THREADS scores the keys are made once.
KERNEL BOUNDS(THREADS, 1) select_top_k_f32(const float* score, const int* pos, int* chosen, long long score_stride, int k,
                                           int settled) {
  SHARED int count[3 * COUNTS];
  clear(count, 3 * COUNTS);
  if (!settled) wait_for_inputs();
  int t = BLOCK_X, n = ((const volatile int*)pos)[t] + 1, each = imin(EACH, (n + 4 * THREADS - 1) / (4 * THREADS) * 4);
  int mine = each * THREAD, span = each * THREADS, done = 0, equal = 0;
  bool loaded = false;
  Cut cut = no_cut(n, k);
  u32 key[EACH];
  barrier();  // the counts are zeros
  wait_for_inputs();
  const float* row = score + t * score_stride;
  chosen += (long long)t * k;
  for (int pass = cut.done ? 3 : 0;; pass = cut.done ? 3 : pass + 1) {  // the last one, 3, writes
    for (int first = mine; first - mine < n; first += span) {
      if (!loaded) load_keys(row, first, n, each, key);
      loaded = n <= span;
      if (pass < 3)
        count_digits(count + pass * COUNTS, key, row, first, imin(each, n - first), pass, cut);
      else
        place(key, first, cut, chosen, &done, &equal);
    }
    if (pass == 3) break;
    barrier();
    cut = refined(cut, count + pass * COUNTS, pass, k);
  }
  for (int i = done + THREAD; i < k; i += THREADS) chosen[i] = -1;
}

// The cut after so many passes over whole rows.
DEVICE Cut cut_of(const int* histogram, int passes, int n, int k) {
  Cut cut = no_cut(n, k);
  for (int pass = 0; pass < passes && !cut.done; pass++) cut = refined(cut, histogram + (BLOCK_Y * 3 + pass) * COUNTS, pass, k);
  return cut;
}
#define MINE (BLOCK_X * CHUNK + THREAD * (CHUNK / THREADS))  // a thread's first score

// histogram[t, pass] of the digits of all rows; it begins as zeros.
KERNEL AT_MOST(THREADS) top_k_count(const float* score, const int* pos, int* histogram, long long score_stride, int k, int pass) {
  wait_for_inputs();
  SHARED int count[COUNTS];
  int t = BLOCK_Y, n = pos[t] + 1;
  const float* row = score + t * score_stride;
  u32 key[EACH];
  if (BLOCK_X * CHUNK >= n) return;
  load_keys(row, MINE, n, CHUNK / THREADS, key);
  Cut cut = cut_of(histogram, pass, n, k);
  if (cut.done) return;
  clear(count, COUNTS);
  barrier();
  count_digits(count, key, row, MINE, imin(CHUNK / THREADS, n - MINE), pass, cut);
  barrier();
  for (int i = THREAD; i < COUNTS; i += THREADS)
    if (count[i]) atomic_add(&histogram[(t * 3 + pass) * COUNTS + i], count[i]);
}

// tally[t, chunk] = (keys above the cut, keys equal to it)
KERNEL AT_MOST(THREADS) top_k_tally(const float* score, const int* pos, const int* histogram, int* tally, long long score_stride,
                                    int k) {
  wait_for_inputs();
  int t = BLOCK_Y, n = pos[t] + 1, more, equal;
  u32 key[EACH];
  load_keys(score + t * score_stride, MINE, n, CHUNK / THREADS, key);
  Cut cut = cut_of(histogram, 3, n, k);
  block_scan(bit_count(bits_above(key, cut)), &more);
  block_scan(bit_count(bits_equal(key, cut)), &equal);
  tally += (t * GRID_X + BLOCK_X) * 2;
  if (THREAD == 0) tally[0] = more, tally[1] = equal;
}

KERNEL AT_MOST(THREADS) top_k_place(const float* score, const int* pos, const int* histogram, const int* tally, int* chosen,
                                    long long score_stride, int k) {
  wait_for_inputs();
  int t = BLOCK_Y, n = pos[t] + 1, done = 0, equal = 0;
  u32 key[EACH];
  load_keys(score + t * score_stride, MINE, n, CHUNK / THREADS, key);
  Cut cut = cut_of(histogram, 3, n, k);
  if (BLOCK_X * CHUNK >= n) return;
  chosen += (long long)t * k;
  for (int i = THREAD; i < BLOCK_X; i += THREADS)
    done += tally[(t * GRID_X + i) * 2], equal += tally[(t * GRID_X + i) * 2 + 1];
  block_scan(done, &done);
  block_scan(equal, &equal);
  done += imin(equal, cut.equals);
  place(key, MINE, cut, chosen, &done, &equal);
  if ((BLOCK_X + 1) * CHUNK >= n)
    for (int i = done + THREAD; i < k; i += THREADS) chosen[i] = -1;
}
