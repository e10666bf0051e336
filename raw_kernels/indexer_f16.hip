// The indexer's scores over f16 keys, on the matrix unit; q is split into two f16 numbers, so that products are as exact as f32's.
//
// score[t, s] = sum over HEADS of scale * weights[t, i] * relu(q[t, i] . key[s]); -inf where s > pos[t]. A block takes `chunks` times
// KEYS keys of one token; keys after pos are not read. settled: there is one token, and the kernel before this one has written neither
// pos nor any key but the one at pos, so that a block's first keys before that are on their way before it ends.

#define KEYS 64
#define BLOCK 256
#define WARPS (BLOCK / LANES)
#define PADDED_HEADS ((HEADS + 15) / 16 * 16)
#define PADDED ((DIM + 15) / 16 * 16)
#define PITCH (PADDED + 8)
#define DOTS (KEYS + 1)
#define TOGETHER 4  // reads of a thread that are on their way
#define PARTS (BLOCK / KEYS)  // threads that share the heads of a key
#define MY_HEADS ((HEADS + PARTS - 1) / PARTS)

// A piece of keys[s], and all keys from s0 to last.
DEVICE void stage_piece(const u16* keys, int s, u32 k, u16* row) {
  stage16(row + k, keys + (k < DIM ? (long long)s * DIM + k : 0), k < DIM);
}
DEVICE void stage_keys(const u16* keys, int s0, int last, u16* rows) {
  _Pragma("unroll 1") for (u32 i = THREAD; i < KEYS * (PADDED / 8); i += BLOCK) {
    u32 r = i / (PADDED / 8);
    if (s0 + (int)r <= last) stage_piece(keys, s0 + r, i % (PADDED / 8) * 8, rows + r * PITCH);
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
DEVICE void split_four(F4 four, u16* high, u16* low) {
  u16 h[4], l[4];
  split_f16(four.x, h, l), split_f16(four.y, h + 1, l + 1), split_f16(four.z, h + 2, l + 2), split_f16(four.w, h + 3, l + 3);
  I2 all_high = {h[0] | h[1] << 16, h[2] | h[3] << 16}, all_low = {l[0] | l[1] << 16, l[2] | l[3] << 16};
  *(I2*)high = all_high, *(I2*)low = all_low;
}

KERNEL BOUNDS(BLOCK, 4) indexer_score_f16(const float* q, const u16* keys, const float* weights, const int* pos, float* score,
                                          int width, int chunks, float scale, int settled) {
  DYNAMIC_SHARED(memory);
  u16* q_high = (u16*)memory;                   // [PADDED_HEADS, PITCH]
  u16* q_low = q_high + PADDED_HEADS * PITCH;   // [PADDED_HEADS, PITCH]
  u16* rows = q_low + PADDED_HEADS * PITCH;     // [KEYS, PITCH]
  float* dots = (float*)(rows + KEYS * PITCH);  // [PADDED_HEADS, DOTS]
  int t = BLOCK_Y, s0 = BLOCK_X * chunks * KEYS;
  int key = THREAD / PARTS, first = THREAD % PARTS * MY_HEADS;  // of each KEYS this thread sums up the heads from `first` on of one
  if (!settled) wait_for_inputs();
  int last = ((const volatile int*)pos)[t];
  stage_keys(keys, s0, settled ? last - 1 : last, rows);
  wait_for_inputs();
  if (settled && s0 <= last && last < s0 + KEYS)
    _Pragma("unroll 1") for (u32 k = 8 * THREAD; k < PADDED; k += 8 * BLOCK) stage_piece(keys, last, k, rows + (last - s0) * PITCH);
  float *out = score + (long long)t * width, factor[MY_HEADS] = {};
  if (s0 <= last) {
    UNROLL for (int i = 0; i < MY_HEADS; i++) factor[i] = first + i < HEADS ? weights[(long long)t * HEADS + first + i] * scale : 0;
    for (u32 i0 = 4 * THREAD; i0 < PADDED_HEADS * PADDED; i0 += TOGETHER * 4 * BLOCK) {
      F4 four[TOGETHER] = {};
      UNROLL for (int j = 0; j < TOGETHER; j++) {
        u32 i = i0 + j * 4 * BLOCK, h = i / PADDED;
        if (h < HEADS) four[j] = four_of(q + ((long long)t * HEADS + h) * DIM, i % PADDED);
      }
      UNROLL for (int j = 0; j < TOGETHER; j++) {
        u32 i = i0 + j * 4 * BLOCK, at = i / PADDED * PITCH + i % PADDED;
        if (i < PADDED_HEADS * PADDED) split_four(four[j], q_high + at, q_low + at);
      }
    }
  }
  for (int c = 0; c < chunks; c++, s0 += KEYS) {
    if (s0 > last) {  // the same for the whole block
      if (THREAD < KEYS && s0 + THREAD < width) out[s0 + THREAD] = as_f32(0xff800000u);
      continue;
    }
    if (c > 0) stage_keys(keys, s0, last, rows);
    stage_wait();
    barrier();
    for (u32 tile = WARP; tile < PADDED_HEADS / 16 * (KEYS / 16); tile += WARPS) {
      u32 h0 = tile / (KEYS / 16) * 16, k0 = tile % (KEYS / 16) * 16;
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
    float sum = 0;
    UNROLL for (int i = 0; i < MY_HEADS; i++) {
      if (first + i >= HEADS) break;
      float dot = dots[(first + i) * DOTS + key];
      sum = fmaf(factor[i], dot <= 0.0f ? 0.0f : dot, sum);  // NaN stays NaN
    }
    sum = lane_sum(sum, PARTS);
    if (THREAD % PARTS == 0 && s0 + key < width) out[s0 + key] = s0 + key <= last ? sum : as_f32(0xff800000u);
  }
}
