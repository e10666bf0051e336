// The indexer's scores over f16 keys, on the matrix unit; q is split into two f16 numbers, so that products are as exact as f32's.
//
// score[t, s] = sum over HEADS of scale * weights[t, i] * relu(q[t, i] . key[s]); -inf where s > pos[t]. A block takes `chunks` times 64
// keys of one token; keys after pos are not read.

#define KEYS 64
#define BLOCK 128
#define WARPS (BLOCK / LANES)
#define PADDED_HEADS ((HEADS + 15) / 16 * 16)
#define PADDED ((DIM + 15) / 16 * 16)
#define PITCH (PADDED + 8)
#define DOTS (KEYS + 1)
#define TOGETHER 8  // reads of a thread that are on their way

DEVICE void stage_keys(const u16* keys, int s0, int last, u16* rows) {
  for (int i = THREAD; i < KEYS * (PADDED / 8); i += BLOCK) {
    int r = i / (PADDED / 8), k = i % (PADDED / 8) * 8;
    bool inside = s0 + r <= last && k < DIM;
    stage16(rows + r * PITCH + k, keys + (inside ? (long long)(s0 + r) * DIM + k : 0), inside);
  }
}
// 4 values from k on of a row of q, zeros past its end.
DEVICE F4 four_of(const float* q, int k) {
  F4 four = {0, 0, 0, 0};
  if (DIM % 4 == 0 && k < DIM) return *(const F4*)(q + k);
  if (k < DIM) four.x = q[k];
  if (k + 1 < DIM) four.y = q[k + 1];
  if (k + 2 < DIM) four.z = q[k + 2];
  if (k + 3 < DIM) four.w = q[k + 3];
  return four;
}

KERNEL BOUNDS(BLOCK, 4) indexer_score_f16(const float* q, const u16* keys, const float* weights, const int* pos, float* score,
                                          int width, int chunks, float scale) {
  wait_for_inputs();
  DYNAMIC_SHARED(memory);
  u16* q_high = (u16*)memory;                      // [PADDED_HEADS, PITCH]
  u16* q_low = q_high + PADDED_HEADS * PITCH;      // [PADDED_HEADS, PITCH]
  u16* rows = q_low + PADDED_HEADS * PITCH;        // [KEYS, PITCH]
  float* dots = (float*)(rows + KEYS * PITCH);     // [PADDED_HEADS, DOTS]
  float* factor = dots + PADDED_HEADS * DOTS;      // [HEADS]
  int t = BLOCK_Y, last = pos[t];
  float* out = score + (long long)t * width;
  int s0 = BLOCK_X * chunks * KEYS;
  if (s0 <= last) {
    stage_keys(keys, s0, last, rows);
    for (int i0 = 4 * THREAD; i0 < PADDED_HEADS * PADDED; i0 += TOGETHER * 4 * BLOCK) {
      F4 four[TOGETHER] = {};
      UNROLL for (int j = 0; j < TOGETHER; j++) {
        int i = i0 + j * 4 * BLOCK, h = i / PADDED;
        if (h < HEADS) four[j] = four_of(q + ((long long)t * HEADS + h) * DIM, i % PADDED);
      }
      UNROLL for (int j = 0; j < TOGETHER; j++) {
        int i = i0 + j * 4 * BLOCK, at = i / PADDED * PITCH + i % PADDED;
        if (i >= PADDED_HEADS * PADDED) break;
        split_f16(four[j].x, q_high + at, q_low + at);
        split_f16(four[j].y, q_high + at + 1, q_low + at + 1);
        split_f16(four[j].z, q_high + at + 2, q_low + at + 2);
        split_f16(four[j].w, q_high + at + 3, q_low + at + 3);
      }
    }
    for (int i = THREAD; i < HEADS; i += BLOCK) factor[i] = weights[(long long)t * HEADS + i] * scale;
  }
  for (int c = 0; c < chunks; c++, s0 += KEYS) {
    if (s0 > last) {  // the same for the whole block
      if (THREAD < KEYS && s0 + THREAD < width) out[s0 + THREAD] = as_f32(0xff800000u);
      continue;
    }
    if (c > 0) stage_keys(keys, s0, last, rows);
    stage_wait();
    barrier();
    for (int tile = WARP; tile < PADDED_HEADS / 16 * (KEYS / 16); tile += WARPS) {
      int h0 = tile / (KEYS / 16) * 16, k0 = tile % (KEYS / 16) * 16;
      float high[TILE_ACC], low[TILE_ACC];
      UNROLL for (int i = 0; i < TILE_ACC; i++) high[i] = low[i] = 0;
      _Pragma("unroll 4") for (int k = 0; k < PADDED; k += 16) {
        TileB b = tile_b(rows + k0 * PITCH + k, 2 * PITCH);
        tile_f16(high, tile_a(q_high + h0 * PITCH + k, 2 * PITCH), b);
        tile_f16(low, tile_a(q_low + h0 * PITCH + k, 2 * PITCH), b);
      }
      UNROLL for (int i = 0; i < TILE_ACC; i++)
        dots[(h0 + tile_row(i)) * DOTS + k0 + tile_col(i)] = fmaf(low[i], 1.0f / 2048.0f, high[i]);
    }
    barrier();
    int s = s0 + THREAD;
    if (THREAD < KEYS && s < width) {
      float sum = 0;
      _Pragma("unroll 8") for (int i = 0; i < HEADS; i++) {
        float dot = dots[i * DOTS + THREAD];
        sum = fmaf(factor[i], dot <= 0.0f ? 0.0f : dot, sum);  // NaN stays NaN
      }
      out[s] = s <= last ? sum : as_f32(0xff800000u);
    }
  }
}
