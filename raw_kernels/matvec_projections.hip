// The products of few tokens that latent attention and its indexer begin with (dots.hip).

// Up to 4 matrices with the same activations x [n_tokens]: y_i[t, row]. Their blocks follow each other in BLOCK_X; one that is
// not there has n_i 0.
KERNEL AT_MOST(BLOCK) JOIN(matvec_projections_, TYPE)(
    const s8* x, const void* x_d, const short* sums, const u8* w0, const u8* scales0, const u16* d0, float* y0, int n0, const u8* w1,
    const u8* scales1, const u16* d1, float* y1, int n1, const u8* w2, const u8* scales2, const u16* d2, float* y2, int n2, const u8* w3,
    const u8* scales3, const u16* d3, float* y3, int n3, int n_tokens) {
  int part = BLOCK_X, row0 = 0, n = 0;
  Matrix m = {w0, scales0, d0};
  float* y = y0;
#define PICK(i)                                                                  \
  if (part >= 0 && part * BLOCK_ROWS < n##i)                                     \
    m.w = w##i, m.scales = scales##i, m.d = d##i, y = y##i, n = n##i, row0 = part * BLOCK_ROWS; \
  part -= (n##i + BLOCK_ROWS - 1) / BLOCK_ROWS;
  PICK(0) PICK(1) PICK(2) PICK(3)
  int t0 = BLOCK_Y * TOKENS, row = imin(row0 + THREAD / GROUP * ROWS, n - ROWS);
  W ring[RING];
  m = FROM_ROW(m, row);
  start_dots(ring, m, m, 1);
  wait_for_inputs();
  float acc[ROWS * TOKENS];
  finish_dots(acc, ring, m, x, x_d, sums, t0, n_tokens, 1);
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) {
    int r = row + i / TOKENS, t = t0 + i % TOKENS;
    if (THREAD % GROUP == 0 && r < n && t < n_tokens) y[(long long)t * n + r] = acc[i];
  }
}
