// Attention over the latent cache: softmax(scale * q . row) over the rows that top_k names, values are a row's first RANK numbers.
// q f32 [T, H, WIDTH], cache [capacity, WIDTH], top_k int32 [T, n] (entries < 0 or > pos are padding; no other row is read).

#define WIDTH (RANK + ROPE)
#define MINUS_INFINITY as_f32(0xff800000u)

// f16 cache, on the matrix unit. A block takes HEADS heads of a token and the chunks BLOCK_X, BLOCK_X + splits, ... of KEYS
// rows; while one chunk is multiplied the next one is on its way. GROUP warps share 16 heads: each takes a part of the depth of
// the scores, for which it keeps q in registers, and a part of the values. q and the weights are split into two f16 numbers
// each, so that products are as exact as f32's. splits > 1: unnormalised sums in part, (largest score, sum of weights) in
// part_ml. settled: the kernel before this one has not written cache, top_k or pos, so that the first rows are on their way before it ends.
#define PADDED ((WIDTH + 15) / 16 * 16)
#define PITCH (PADDED + 8)  // f16 numbers of a staged row
#define P_PITCH (KEYS + 8)
#define S_PITCH (KEYS + 8)  // scores of a head; shifts the banks
#define WARPS (HEADS / 16 * GROUP)
#define BLOCK (WARPS * LANES)
#define MY_HEADS (HEADS / WARPS)  // of a warp, in q's split and in the softmax
#define HEAD_LANES (LANES / MY_HEADS)
#define KEYS_EACH (KEYS / HEAD_LANES)
#define KEYS_PER_LANE ((KEYS + LANES - 1) / LANES)
#define Q_PAIRS ((PADDED / 2 + LANES - 1) / LANES)
#define Q_STEPS ((PADDED / 16 + GROUP - 1) / GROUP)
#define R_TILES ((RANK + 15) / 16)
#define MY_TILES ((R_TILES + GROUP - 1) / GROUP)
#define P_SCALE 16384.0f  // of the softmax weights, at most 1, so that their low part is no subnormal
#define ROWS_AT_ONCE (BLOCK / 8)  // 8 threads bring a row, in pieces of 64 numbers
#define PASSES ((KEYS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
#define ROW_PIECES ((PADDED + 63) / 64)
#define PIECES (PASSES * ROW_PIECES)

// The entries from top_k[k0] on, a lane's are number LANE, LANE + LANES, ... Read early they must come from memory: a first-level
// cache may hold what was there before.
DEVICE void load_entries(const int* top_k, int k0, int n, int* row) {
  UNROLL for (int j = 0; j < KEYS_PER_LANE; j++) {
    int k = LANE + j * LANES;
    row[j] = k < KEYS && k0 + k < n ? ((const volatile int*)top_k)[k0 + k] : -1;
  }
}
// Goes on from the loaded entries at k0 to the first chunk that is not all padding, whose padding becomes -1. Returns where it
// is, n and more: nowhere. The same in all warps.
DEVICE int find_rows(const int* top_k, int k0, int step, int n, int last, int* row) {
  for (; k0 < n; k0 += step, load_entries(top_k, k0, n, row)) {
    bool some = false;
    UNROLL for (int j = 0; j < KEYS_PER_LANE; j++) {
      if (row[j] > last) row[j] = -1;
      some |= row[j] >= 0;
    }
    if (any_lane(some)) break;
  }
  return k0;
}

typedef struct { const u16* from[PASSES]; bool chosen[PASSES]; } Gather;  // this thread's part of the rows
DEVICE Gather gather_rows(const u16* cache, const int* row) {
  Gather g;
  UNROLL for (int pass = 0; pass < PASSES; pass++) {
    int r = pass * ROWS_AT_ONCE + THREAD / 8, from = lane_read(row[0], r % LANES);
    UNROLL for (int j = 1; j < KEYS_PER_LANE; j++) {
      int other = lane_read(row[j], r % LANES);
      if (r / LANES == j) from = other;
    }
    g.chosen[pass] = from >= 0;
    g.from[pass] = cache + (long long)imax(from, 0) * WIDTH + THREAD % 8 * 8;
  }
  return g;
}
// Starts the copy of one of PIECES, zeros for padding.
DEVICE void stage_piece(int piece, Gather g, u16* staged) {
  int pass = piece / ROW_PIECES, first = piece % ROW_PIECES * 64;
  int r = pass * ROWS_AT_ONCE + THREAD / 8, k = first + THREAD % 8 * 8;
  if (r >= KEYS || k >= PADDED) return;
#if WIDTH % 8 == 0
  stage16(staged + r * PITCH + k, g.from[pass] + first, g.chosen[pass] && k < WIDTH);
#else
  UNROLL for (int i = 0; i < 8; i++)
    staged[r * PITCH + k + i] = g.chosen[pass] && k + i < WIDTH ? ((const volatile u16*)g.from[pass])[first + i] : (u16)0;
#endif
}

KERNEL BOUNDS(BLOCK, 1) attention_f16(const float* q, const u16* cache, const int* top_k, const int* pos, float* out, float* part,
                                      float* part_ml, int heads, int n, int splits, float scale, int settled) {
  DYNAMIC_SHARED(memory);
  u16* rows = (u16*)memory;              // [2][KEYS, PITCH]
  u16* q_high = rows + KEYS * PITCH;     // [HEADS, PITCH] before the second chunk comes
  u16* q_low = q_high + HEADS * PITCH;   // [HEADS, PITCH]
  u16* p_high = rows + (KEYS + (KEYS > 2 * HEADS ? KEYS : 2 * HEADS)) * PITCH;  // [HEADS, P_PITCH]
  u16* p_low = p_high + HEADS * P_PITCH;
  float* score = (float*)(p_low + HEADS * P_PITCH);  // [GROUP, HEADS, S_PITCH] parts of the sum
  float* shrink = score + GROUP * HEADS * S_PITCH;   // [HEADS] at the end the sum of weights
  float* q_scale = shrink + HEADS;                   // [HEADS]
  float* bias = q_scale + HEADS;                     // [KEYS] 0, or -inf for padding
  int t = BLOCK_Y, head0 = BLOCK_Z * HEADS, group = WARP / GROUP, member = WARP % GROUP, step = splits * KEYS;
  int my_head = WARP * MY_HEADS + LANE / HEAD_LANES, my_key = LANE % HEAD_LANES;
  if (!settled) wait_for_inputs();
  top_k += (long long)t * n;

  int here = BLOCK_X * KEYS, next, row[KEYS_PER_LANE], next_row[KEYS_PER_LANE], last = ((const volatile int*)pos)[t];
  load_entries(top_k, here, n, row);
  here = find_rows(top_k, here, step, n, last, row);
  if (here < n) {
    Gather g = gather_rows(cache, row);
    UNROLL for (int piece = 0; piece < PIECES; piece++) stage_piece(piece, g, rows);
  }
  next = here + step;
  load_entries(top_k, next, n, next_row);
  wait_for_inputs();
  F2 mine[MY_HEADS * Q_PAIRS];
  UNROLL for (int i = 0; i < MY_HEADS; i++) UNROLL for (int j = 0; j < Q_PAIRS; j++) {
    int head = head0 + WARP * MY_HEADS + i, k = 2 * (LANE + j * LANES);
    const float* from = q + ((long long)t * heads + head) * WIDTH + k;
    F2 pair = {0, 0};
#if WIDTH % 2 == 0
    if (head < heads && k < WIDTH) pair = *(const F2*)from;
#else
    if (head < heads && k < WIDTH) pair.x = from[0];
    if (head < heads && k + 1 < WIDTH) pair.y = from[1];
#endif
    mine[i * Q_PAIRS + j] = pair;
  }
  UNROLL for (int i = 0; i < MY_HEADS; i++) {  // times a power of two that makes the largest one 2^14 and more
    F2* x = mine + i * Q_PAIRS;
    float most = 0;
    UNROLL for (int j = 0; j < Q_PAIRS; j++) most = fmaxf(most, fmaxf(fabsf(x[j].x), fabsf(x[j].y)));
    int exponent = imin(imax((int)(as_u32(lane_max(most, LANES)) >> 23), 32), 240), h = WARP * MY_HEADS + i;
    float factor = as_f32((u32)(254 + 14 - exponent) << 23);
    if (LANE == 0) q_scale[h] = as_f32((u32)(exponent - 14) << 23) * scale;
    UNROLL for (int j = 0; j < Q_PAIRS; j++) {
      int k = 2 * (LANE + j * LANES);
      float a = x[j].x * factor, b = x[j].y * factor;
      u16 high_a = f32_to_f16(a), high_b = f32_to_f16(b);
      if (k >= PADDED) break;
      *(u32*)(q_high + h * PITCH + k) = high_a | (u32)high_b << 16;
      *(u32*)(q_low + h * PITCH + k) = f32_to_f16(a - f16_to_f32(high_a)) | (u32)f32_to_f16(b - f16_to_f32(high_b)) << 16;
    }
  }
  barrier();
  TileA high[Q_STEPS], low[Q_STEPS];  // of this warp's part of the depth
  UNROLL for (int i = 0; i < Q_STEPS; i++) {
    int k = imin((member + i * GROUP) * 16, PADDED - 16);
    high[i] = tile_a(q_high + group * 16 * PITCH + k, 2 * PITCH);
    low[i] = tile_a(q_low + group * 16 * PITCH + k, 2 * PITCH);
  }
  next = find_rows(top_k, next, step, n, last, next_row);

  float largest = MINUS_INFINITY, sum = 0, my_scale = q_scale[my_head];  // of my_head
  float acc[MY_TILES * TILE_ACC];
  UNROLL for (int i = 0; i < MY_TILES * TILE_ACC; i++) acc[i] = 0;

  for (u16* other = rows + KEYS * PITCH; here < n;) {
    int after = next + step, after_row[KEYS_PER_LANE];
    UNROLL for (int j = 0; j < KEYS_PER_LANE; j++)
      if (WARP == 0 && LANE + j * LANES < KEYS) bias[LANE + j * LANES] = row[j] >= 0 ? 0.0f : MINUS_INFINITY;
    stage_wait();
    barrier();  // the rows are there, and no one reads the others any more
    load_entries(top_k, after, n, after_row);
    Gather g = gather_rows(cache, next_row);
    {  // scores: each warp of the group takes its part of the depth for all keys
      float dot[KEYS / 16 * TILE_ACC];
      UNROLL for (int i = 0; i < KEYS / 16 * TILE_ACC; i++) dot[i] = 0;
      UNROLL for (int i = 0; i < Q_STEPS; i++) {
        UNROLL for (int piece = i * PIECES / Q_STEPS; piece < (i + 1) * PIECES / Q_STEPS; piece++)
          if (next < n) stage_piece(piece, g, other);
        int k = (member + i * GROUP) * 16;
        if (k < PADDED)
          UNROLL for (int m = 0; m < KEYS / 16; m++) {
            TileB b = tile_b(rows + m * 16 * PITCH + k, 2 * PITCH);
            tile_f16(dot + m * TILE_ACC, high[i], b);
            tile_f16(dot + m * TILE_ACC, low[i], b);
          }
      }
      UNROLL for (int m = 0; m < KEYS / 16; m++) UNROLL for (int i = 0; i < TILE_ACC; i++)
        score[(member * HEADS + group * 16 + tile_row(i)) * S_PITCH + m * 16 + tile_col(i)] = dot[m * TILE_ACC + i];
    }
    barrier();
    {
      float s[KEYS_EACH], higher = largest, total = 0;
      UNROLL for (int j = 0; j < KEYS_EACH; j++) {
        int k = my_key + j * HEAD_LANES;
        s[j] = score[my_head * S_PITCH + k];
        UNROLL for (int m = 1; m < GROUP; m++) s[j] += score[(m * HEADS + my_head) * S_PITCH + k];
        s[j] = fmaf(s[j], my_scale, bias[k]);
        higher = fmaxf(higher, s[j]);
      }
      higher = lane_max(higher, HEAD_LANES);
      UNROLL for (int j = 0; j < KEYS_EACH; j++) {
        int k = my_key + j * HEAD_LANES;
        float p = expf(s[j] - higher);
        total += p;
        u16 first = f32_to_f16(p * P_SCALE);
        p_high[my_head * P_PITCH + k] = first;
        p_low[my_head * P_PITCH + k] = f32_to_f16(p * P_SCALE - f16_to_f32(first));
      }
      float factor = expf(largest - higher);
      sum = sum * factor + lane_sum(total, HEAD_LANES);
      largest = higher;
      if (my_key == 0) shrink[my_head] = factor;
    }
    barrier();
    UNROLL for (int i = 0; i < TILE_ACC; i++) {
      float factor = shrink[group * 16 + tile_row(i)];
      UNROLL for (int m = 0; m < MY_TILES; m++) acc[m * TILE_ACC + i] *= factor;
    }
    UNROLL for (int k = 0; k < KEYS; k += 16) {
      TileA first = tile_a(p_high + group * 16 * P_PITCH + k, 2 * P_PITCH);
      TileA rest = tile_a(p_low + group * 16 * P_PITCH + k, 2 * P_PITCH);
      UNROLL for (int m = 0; m < MY_TILES; m++) {
        int tile = member + m * GROUP;
        if (tile < R_TILES) {
          TileB b = tile_b_f16_transposed(rows + k * PITCH + tile * 16, 2 * PITCH);
          tile_f16(acc + m * TILE_ACC, first, b);
          tile_f16(acc + m * TILE_ACC, rest, b);
        }
      }
    }
    UNROLL for (int j = 0; j < KEYS_PER_LANE; j++) row[j] = next_row[j], next_row[j] = after_row[j];
    u16* now = rows;
    rows = other, other = now;
    here = next, next = find_rows(top_k, after, step, n, last, next_row);
  }
  barrier();  // the last factors have been read
  if (my_key == 0) {
    float* ml = part_ml + (((long long)t * splits + BLOCK_X) * heads + head0 + my_head) * 2;
    shrink[my_head] = sum;
    if (splits > 1 && head0 + my_head < heads) ml[0] = largest, ml[1] = sum;
  }
  barrier();
  UNROLL for (int i = 0; i < TILE_ACC; i++) {
    int h = group * 16 + tile_row(i), head = head0 + h, r0 = member * 16 + tile_col(i);
    float total = shrink[h], factor = (splits == 1 ? 1.0f / total : 1.0f) / P_SCALE;
    float* to = splits == 1 ? out + ((long long)t * heads + head) * RANK
                            : part + (((long long)t * splits + BLOCK_X) * heads + head) * RANK;
    if (head < heads)  // a part without rows is zero, and an output without rows NaN
      UNROLL for (int m = 0; m < MY_TILES; m++) {
        int r = r0 + m * GROUP * 16, at = m * TILE_ACC + i;
        if (r >= RANK) break;
#if TILE_PAIRS && RANK % 2 == 0
        F2 pair = {acc[at] * factor, acc[at + 1 - i % 2] * factor};
        if (i % 2 == 0) *(F2*)(to + r) = pair;
#else
        to[r] = acc[at] * factor;
#endif
      }
  }
}
