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
    _Pragma("unroll 8") for (int i = THREAD; i < PADDED_HEADS * PADDED; i += BLOCK) {
      int h = i / PADDED, k = i % PADDED;
      bool inside = h < HEADS && k < DIM;
      split_f16(inside ? q[((long long)t * HEADS + h) * DIM + k] : 0.0f, &q_high[h * PITCH + k], &q_low[h * PITCH + k]);
    }
    for (int i = THREAD; i < HEADS; i += BLOCK) factor[i] = weights[(long long)t * HEADS + i] * scale;
  }
  for (int c = 0; c < chunks; c++, s0 += KEYS) {
    if (s0 > last) {  // the same for the whole block
      if (THREAD < KEYS && s0 + THREAD < width) out[s0 + THREAD] = as_f32(0xff800000u);
      continue;
    }
    for (int i = THREAD; i < KEYS * (PADDED / 8); i += BLOCK) {
      int r = i / (PADDED / 8), k = i % (PADDED / 8) * 8;
      bool inside = s0 + r <= last && k < DIM;
      stage16(rows + r * PITCH + k, keys + (inside ? (long long)(s0 + r) * DIM + k : 0), inside);
    }
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
