// Some of a token's experts, from host memory that the device reads in place, to weights of its own with their parts apart (dots.hip).

#define WORD_q8_0 u16
#define WORD_q2_k u32
#define WORD JOIN(WORD_, TYPE)
#define WORDS (BLOCK_BYTES / (int)sizeof(WORD))  // of a block

#define TOGETHER 4  // words that a thread has on their way

// Where word `at` of a block goes: q8_0 is d and 32 bytes, q2_k 16 bytes of scales, 64 bytes and d with dmin.
DEVICE u16* place_q8_0(u8* w, u8* scales, u16* d, long long block, int at) {
  (void)scales;
  return at == 0 ? d + block : (u16*)w + 16 * block + at - 1;
}
DEVICE u32* place_q2_k(u8* w, u8* scales, u16* d, long long block, int at) {
  return at < 4 ? (u32*)scales + 4 * block + at : at < 20 ? (u32*)w + 16 * block + at - 4 : (u32*)d + block;
}

// Place BLOCK_Y gets expert experts[first + BLOCK_Y] of host, which has n_blocks blocks of weights for each.
KERNEL JOIN(fetch_experts_, TYPE)(const u8* host, const int* experts, u8* w, u8* scales, u16* d, int first, int n_blocks) {
  wait_for_inputs();
  const WORD* from = (const WORD*)host + (long long)experts[first + BLOCK_Y] * n_blocks * WORDS;
  long long to = (long long)BLOCK_Y * n_blocks;
  int n = n_blocks * WORDS, step = GRID_X * N_THREADS;
  for (int i0 = BLOCK_X * N_THREADS + THREAD; i0 < n; i0 += TOGETHER * step) {
    WORD word[TOGETHER];
    UNROLL for (int k = 0; k < TOGETHER; k++) word[k] = from[imin(i0 + k * step, n - 1)];
    UNROLL for (int k = 0; k < TOGETHER; k++) {
      int i = imin(i0 + k * step, n - 1);
      *JOIN(place_, TYPE)(w, scales, d, to + i / WORDS, i % WORDS) = word[k];
    }
  }
}
