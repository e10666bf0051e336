// The product of few tokens with queries' weights (dots.hip), their rope parts turned on the way out.

// y[t, row], where of each head's `width` rows the 2 * n from `first` on are turned in pairs (elementwise.hip) and go to
// turned[t, head] instead, whose rows are turned_stride elements apart. ROWS, first and width are even.
KERNEL AT_MOST(BLOCK) JOIN(matvec_rope_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                               const short* sums, const float* cosine, const float* sine, float* y, float* turned,
                                               int n_tokens, int n_out, int width, int first, int n, long long turned_stride) {
  int t0 = BLOCK_Y * TOKENS, row = BLOCK_X * BLOCK_ROWS + THREAD / GROUP * ROWS;
  Matrix m = {w, scales, d};
  W ring[RING];
  start_dots(ring, m, m, 1, 0, row, n_out);
  wait_for_inputs();
  float acc[ROWS * TOKENS];
  finish_dots(acc, ring, m, 0, row, n_out, x, x_d, sums, t0, n_tokens, 1);
  if (THREAD % GROUP) return;
  UNROLL for (int t = 0; t < TOKENS; t++) UNROLL for (int r = 0; r < ROWS; r += 2) {
    long long token = t0 + t, head = (row + r) / width;
    int at = (row + r) % width - first;
    if (token >= n_tokens || row + r >= n_out) continue;
    float even = acc[r * TOKENS + t], odd = acc[(r + 1) * TOKENS + t], *to = y + token * n_out + row + r;
    if (at >= 0 && at < 2 * n) {
      float c = cosine[token * n + at / 2], s = sine[token * n + at / 2], even_turned = even * c - odd * s;
      odd = even * s + odd * c, even = even_turned;
      to = turned + (token * (n_out / width) + head) * turned_stride + at;
    }
    to[0] = even, to[1] = odd;
  }
}
