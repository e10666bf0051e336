// chosen[t] = the k best of score[t, 0..pos[t]], ascending, then -1; nothing after pos is read. Radix select: 3 passes of 11, 11 and
// 10 bits find the key of the last one chosen and how many of its equals are taken. Blocks of 1024 threads: one per token, or for
// long rows one per token and CHUNK scores: top_k_count three times, top_k_tally, top_k_place.

#define BINS 2048
#define COPIES 4  // of a block's counts, in other banks: lanes that count the same digit get in each other's way
#define COPY (BINS + 8)
#define EACH 4  // neighbouring scores that one thread takes at a time
#define CHUNK (EACH * 1024)

// All keys above the threshold are chosen, and `equals` of those equal to it; NaN has key 0. done: no pass can change it.
typedef struct { u32 threshold; int equals; bool done; } Cut;

DEVICE int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
// The digit of a key in this pass, -1 if it is not among those that are still to be told apart.
DEVICE int digit_of(u32 key, int pass, Cut cut) {
  if (!key || (pass && (key ^ cut.threshold) >> shift_of(pass - 1))) return -1;
  return key >> shift_of(pass) & (pass == 2 ? BINS / 2 - 1 : BINS - 1);
}
// The counts of a block begin as zeros. All 1024 threads call these.
DEVICE void clear(int* count) {
  barrier();  // they have been read
  for (int i = THREAD; i < COPIES * COPY; i += N_THREADS) count[i] = 0;
  barrier();
}
DEVICE void count_digit(int* count, int digit) {
  if (digit >= 0) atomic_add(&count[THREAD % COPIES * COPY + digit], 1);
}
DEVICE int counted(const int* count, int bin, int copies) {
  int n = 0;
  UNROLL for (int c = 0; c < COPIES; c++) n += c < copies ? count[c * COPY + bin] : 0;
  return n;
}
// count: how many keys have each digit, in so many copies. All 1024 threads call it.
DEVICE Cut refined(Cut cut, const int* count, int copies, int pass, int k) {
  SHARED u32 prefix;
  SHARED int wanted;
  int total, left = pass ? cut.equals : k, high = BINS - 1 - 2 * THREAD;  // this thread's bins: high and high - 1
  int in_high = counted(count, high, copies), in_both = in_high + counted(count, high - 1, copies), above = block_scan(in_both, &total);
  if (above < left && above + in_both >= left) {
    bool upper = above + in_high >= left;
    prefix = cut.threshold | (u32)(upper ? high : high - 1) << shift_of(pass);
    wanted = left - above - (upper ? 0 : in_high);
    if (prefix && wanted == (upper ? in_high : in_both - in_high)) prefix--, wanted = 0;  // all that begin like this
  }
  barrier();
  if (pass == 0 && total <= k)
    cut.done = true;
  else
    cut.threshold = prefix, cut.equals = wanted, cut.done = !wanted;
  return cut;
}
DEVICE Cut no_cut(int n, int k) {
  Cut cut = {0, 0, n <= k};
  return cut;
}
// 1 << 0: above the cut, 1 << 16: equal to it. Both are counted at once.
DEVICE int kind_of(u32 key, Cut cut) { return key > cut.threshold ? 1 : key && key == cut.threshold ? 1 << 16 : 0; }

// The chosen among row[first..first + CHUNK) go to their places, *done of which are filled; *equal equals have been seen.
DEVICE void place(const float* row, int first, int n, Cut cut, int* chosen, int* done, int* equal) {
  u32 key[EACH];
  int mine = 0, sums;
  UNROLL for (int j = 0; j < EACH; j++) {
    int i = first + EACH * THREAD + j;
    key[j] = i < n ? sort_key(row[i]) : 0;
    mine += kind_of(key[j], cut);
  }
  int before = block_scan(mine, &sums);
  int more_before = *done + (before & 0xffff), equal_before = *equal + (before >> 16), taken_before = imin(*equal, cut.equals);
  UNROLL for (int j = 0; j < EACH; j++) {
    int kind = kind_of(key[j], cut), at = more_before + imin(equal_before, cut.equals) - taken_before;
    if (kind == 1 || (kind && equal_before < cut.equals)) chosen[at] = first + EACH * THREAD + j;
    more_before += kind & 1, equal_before += kind >> 16;
  }
  *done += (sums & 0xffff) + imin(*equal + (sums >> 16), cut.equals) - taken_before;
  *equal += sums >> 16;
}

KERNEL select_top_k_f32(const float* score, const int* pos, int* chosen, long long score_stride, int k) {
  wait_for_inputs();
  SHARED int count[COPIES * COPY];
  int t = BLOCK_X, n = pos[t] + 1, done = 0, equal = 0;
  const float* row = score + t * score_stride;
  Cut cut = no_cut(n, k);
  chosen += (long long)t * k;
  for (int pass = 0; pass < 3 && !cut.done; pass++) {
    clear(count);
    _Pragma("unroll 4") for (int i = THREAD; i < n; i += N_THREADS) count_digit(count, digit_of(sort_key(row[i]), pass, cut));
    barrier();
    cut = refined(cut, count, COPIES, pass, k);
  }
  for (int first = 0; first < n; first += CHUNK) place(row, first, n, cut, chosen, &done, &equal);
  for (int i = done + THREAD; i < k; i += N_THREADS) chosen[i] = -1;
}

// histogram[t, pass] of the digits of all rows; it begins as zeros.
KERNEL top_k_count(const float* score, const int* pos, int* histogram, long long score_stride, int k, int pass) {
  wait_for_inputs();
  SHARED int count[COPIES * COPY];
  int t = BLOCK_Y, n = pos[t] + 1, first = BLOCK_X * CHUNK;
  const float* row = score + t * score_stride;
  Cut cut = no_cut(n, k);
  histogram += t * 3 * BINS;
  for (int p = 0; p < pass && !cut.done; p++) cut = refined(cut, histogram + p * BINS, 1, p, k);
  if (cut.done || first >= n) return;
  clear(count);
  UNROLL for (int i = first + THREAD; i < first + CHUNK; i += 1024)
    count_digit(count, i < n ? digit_of(sort_key(row[i]), pass, cut) : -1);
  barrier();
  for (int i = THREAD; i < BINS; i += N_THREADS)
    if (int found = counted(count, i, COPIES)) atomic_add(&histogram[pass * BINS + i], found);
}

DEVICE Cut final_cut(const int* histogram, int n, int k) {
  Cut cut = no_cut(n, k);
  for (int pass = 0; pass < 3 && !cut.done; pass++) cut = refined(cut, histogram + (BLOCK_Y * 3 + pass) * BINS, 1, pass, k);
  return cut;
}

// tally[t, chunk] = (keys above the cut, keys equal to it)
KERNEL top_k_tally(const float* score, const int* pos, const int* histogram, int* tally, long long score_stride, int k) {
  wait_for_inputs();
  int t = BLOCK_Y, n = pos[t] + 1, first = BLOCK_X * CHUNK, mine = 0, sums;
  const float* row = score + t * score_stride;
  Cut cut = final_cut(histogram, n, k);
  UNROLL for (int i = first + THREAD; i < first + CHUNK; i += 1024) mine += i < n ? kind_of(sort_key(row[i]), cut) : 0;
  block_scan(mine, &sums);
  tally += (t * GRID_X + BLOCK_X) * 2;
  if (THREAD == 0) tally[0] = sums & 0xffff, tally[1] = sums >> 16;
}

KERNEL top_k_place(const float* score, const int* pos, const int* histogram, const int* tally, int* chosen, long long score_stride,
                   int k) {
  wait_for_inputs();
  int t = BLOCK_Y, n = pos[t] + 1, first = BLOCK_X * CHUNK, more = 0, same = 0, done, equal;
  const float* row = score + t * score_stride;
  Cut cut = final_cut(histogram, n, k);
  if (first >= n) return;
  chosen += (long long)t * k;
  for (int i = THREAD; i < BLOCK_X; i += N_THREADS)
    more += tally[(t * GRID_X + i) * 2], same += tally[(t * GRID_X + i) * 2 + 1];
  block_scan(more, &done);
  block_scan(same, &equal);
  done += imin(equal, cut.equals);
  place(row, first, n, cut, chosen, &done, &equal);
  if (first + CHUNK >= n)
    for (int i = done + THREAD; i < k; i += N_THREADS) chosen[i] = -1;
}
