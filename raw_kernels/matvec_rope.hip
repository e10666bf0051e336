// The product of few tokens with queries' weights (dots.hip), their rope parts turned on the way out.

// y[t, row], where of each head's `width` rows the 2 * n from `first` on are turned in pairs (elementwise.hip) and go to
// turned[t, head] instead, whose rows are turned_stride elements apart. ROWS, first and width are even.
DEVICE void put_turned(const float* acc, int row, int t0, const float* cosine, const float* sine, float* y, float* turned, int n_tokens,
                       int n_out, int width, int first, int n, long long turned_stride) {
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
KERNEL AT_MOST(BLOCK) JOIN(matvec_rope_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                               const short* sums, const float* cosine, const float* sine, float* y, float* turned,
                                               int n_tokens, int n_out, int width, int first, int n, long long turned_stride) {
  int t0 = BLOCK_Y * TOKENS, row = imin(BLOCK_X * BLOCK_ROWS + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix m = {w, scales, d};
  m = FROM_ROW(m, row);
  W ring[RING];
  start_dots(ring, m, m, 1);
  wait_for_inputs();
  float acc[ROWS * TOKENS];
  finish_dots(acc, ring, m, x, x_d, sums, t0, n_tokens, 1);
  put_turned(acc, row, t0, cosine, sine, y, turned, n_tokens, n_out, width, first, n, turned_stride);
}

// The same of one token, with the RMSNorm of x, which each block of threads makes and rounds itself: saves a launch. normed gets it,
// if it is given. Where kv [rank + 2 * n] or key [key_n] is given, the grid's last block makes the row of a cache of it instead
// (cache_rows.hip).
#define WARPS (BLOCK / LANES)
#define TURNS ((N_IN / 256 + WARPS - 1) / WARPS)  // 256 values that a warp makes
DEVICE void load_mine(const float* x, float* mine) {  // of each turn the PER_LANE values of this thread
  UNROLL for (int i = 0; i < TURNS * PER_LANE; i += 4) {
    int at = (WARP + i / PER_LANE * WARPS) * 256 + LANE * PER_LANE + i % PER_LANE;
    F4 four = {0, 0, 0, 0};
    if (at < N_IN) four = *(const F4*)(x + at);
    mine[i] = four.x, mine[i + 1] = four.y, mine[i + 2] = four.z, mine[i + 3] = four.w;
  }
}
DEVICE void round_q8_0(const float* x, int b, s8* q, u16* d, short* sums) { (void)sums, store_q8_0(x, q + b * 256, d + b * 8); }
DEVICE void round_q2_k(const float* x, int b, s8* q, u16* d, short* sums) { store_q8_k(x, b, q, (float*)d, sums); }

KERNEL AT_MOST(BLOCK) JOIN(matvec_queries_, TYPE)(const u8* w, const u8* scales, const u16* d, const float* x, const float* weight,
                                                  const float* cosine, const float* sine, float* y, float* turned, float* normed,
                                                  int n_out, int width, int first, int n, long long turned_stride, float eps,
                                                  const int* pos, const float* kv, const float* kv_weight, float* latent, u16* cache,
                                                  int rank, const float* key, const float* key_weight, const float* key_bias, u16* keys,
                                                  int key_n, float key_eps) {
  SHARED s8 q[N_IN];
  SHARED u16 q_d[N_IN / 32];
  SHARED short q_sums[N_IN / 16];
  int row = imin(BLOCK_X * BLOCK_ROWS + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix m = {w, scales, d};
  m = FROM_ROW(m, row);
  W ring[RING];
  start_dots(ring, m, m, 1);
  float made[TURNS * PER_LANE], gain[TURNS * PER_LANE], sum = 0;
  load_mine(weight, gain);
  wait_for_inputs();
  if (pos && BLOCK_X == GRID_X - 1) {
    if (kv)
      put_latent(kv, kv_weight, cosine, sine, latent, cache + (long long)pos[0] * (rank + 2 * n), rank, n, eps);
    else
      put_index_key(key, key_weight, key_bias, cosine, sine, keys + (long long)pos[0] * key_n, key_n, n, key_eps);
    return;
  }
  load_mine(x, made);
  UNROLL for (int i = 0; i < TURNS * PER_LANE; i++) sum = fmaf(made[i], made[i], sum);
  float root = sqrtf(block_sum(sum) / (float)N_IN + eps);
  UNROLL for (int i = 0; i < TURNS * PER_LANE; i++) made[i] = made[i] / root * gain[i];
  UNROLL for (int turn = 0; turn < TURNS; turn++) {
    int b = WARP + turn * WARPS;
    if (b >= N_IN / 256) break;
    JOIN(round_, TYPE)(made + turn * PER_LANE, b, q, q_d, q_sums);
    if (normed && BLOCK_X == 0)
      UNROLL for (int j = 0; j < PER_LANE; j++) normed[b * 256 + LANE * PER_LANE + j] = made[turn * PER_LANE + j];
  }
  barrier();
  float acc[ROWS * TOKENS];
  finish_dots(acc, ring, m, q, q_d, q_sums, 0, 1, 1);
  put_turned(acc, row, 0, cosine, sine, y, turned, 1, n_out, width, first, n, turned_stride);
}
