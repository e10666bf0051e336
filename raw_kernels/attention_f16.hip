// Attention over the latent cache: softmax(scale * q . row) over the rows that top_k names, values are a row's first RANK numbers.
// q f32 [T, H, WIDTH], cache [capacity, WIDTH], top_k int32 [T, n] (entries < 0 or > pos are padding; no other row is read).

#define WIDTH (RANK + ROPE)
#define MINUS_INFINITY as_f32(0xff800000u)

// f16 cache, on the matrix unit. A block takes HEADS heads of a token and the chunks BLOCK_X, BLOCK_X + splits, ... of KEYS
// rows; GROUP warps share 16 heads. q and the weights are split into two f16 numbers each, so that products are as exact as
// f32's. splits > 1: unnormalised sums in part, (largest score, sum of weights) in part_ml.
#define PADDED ((WIDTH + 15) / 16 * 16)
#define PITCH (PADDED + 8)  // f16 numbers of a staged row
#define P_PITCH (KEYS + 8)
#define S_PITCH (KEYS + 8)  // scores of a head; shifts the banks
#define WARPS (HEADS / 16 * GROUP)
#define BLOCK (WARPS * LANES)
#define KEYS_PER_LANE ((KEYS + LANES - 1) / LANES)
#define MY_HEADS (HEADS / WARPS)
#define R_TILES ((RANK + 15) / 16)
#define P_SCALE 16384.0f  // of the softmax weights, at most 1, so that their low part is no subnormal
#define MY_TILES ((R_TILES + GROUP - 1) / GROUP)

// The KEYS rows from top_k[k0] on, zeros for padding. False if all are padding.
DEVICE bool stage_rows(const u16* cache, const int* top_k, int k0, int n, int last, int* chosen, u16* rows) {
  int some = 0;
  for (int i = THREAD; i < KEYS; i += BLOCK) {
    int k = k0 + i < n ? top_k[k0 + i] : -1;
    chosen[i] = k >= 0 && k <= last ? k : -1;
    some |= chosen[i] >= 0;
  }
  if (block_sum((float)some) == 0.0f) return false;  // also a barrier
#if WIDTH % 8 == 0
  _Pragma("unroll 4") for (int i = THREAD; i < KEYS * (PADDED / 8); i += BLOCK) {
    int r = i / (PADDED / 8), k = i % (PADDED / 8) * 8;
    bool inside = k < WIDTH && chosen[r] >= 0;
    stage16(rows + r * PITCH + k, cache + (inside ? (long long)chosen[r] * WIDTH + k : 0), inside);
  }
#else
  for (int i = THREAD; i < KEYS * PADDED; i += BLOCK) {
    int r = i / PADDED, k = i % PADDED;
    rows[r * PITCH + k] = k < WIDTH && chosen[r] >= 0 ? cache[(long long)chosen[r] * WIDTH + k] : (u16)0;
  }
#endif
  return true;
}

KERNEL BOUNDS(BLOCK, 1) attention_f16(const float* q, const u16* cache, const int* top_k, const int* pos, float* out, float* part,
                                      float* part_ml, int heads, int n, int splits, float scale) {
  DYNAMIC_SHARED(memory);
  u16* q_high = (u16*)memory;            // [HEADS, PITCH]
  u16* q_low = q_high + HEADS * PITCH;   // [HEADS, PITCH]
  u16* rows = q_low + HEADS * PITCH;     // [KEYS, PITCH]
  u16* p_high = rows + KEYS * PITCH;     // [HEADS, P_PITCH]
  u16* p_low = p_high + HEADS * P_PITCH;
  float* score = (float*)(p_low + HEADS * P_PITCH);  // [GROUP, HEADS, S_PITCH] parts of the sum
  float* shrink = score + GROUP * HEADS * S_PITCH;              // [HEADS] at the end the sum of weights
  int* chosen = (int*)(shrink + HEADS);              // [KEYS]
  int t = BLOCK_Y, head0 = BLOCK_Z * HEADS, last = pos[t];
  top_k += (long long)t * n;

  float largest[MY_HEADS], sum[MY_HEADS];  // of the heads WARP, WARP + WARPS, ...
  UNROLL for (int i = 0; i < MY_HEADS; i++) largest[i] = MINUS_INFINITY, sum[i] = 0;
  bool loaded = false;
  int group = WARP / GROUP, member = WARP % GROUP;
  float acc[MY_TILES * TILE_ACC];
  UNROLL for (int i = 0; i < MY_TILES * TILE_ACC; i++) acc[i] = 0;

  for (int k0 = BLOCK_X * KEYS; k0 < n; k0 += splits * KEYS) {
    if (!stage_rows(cache, top_k, k0, n, last, chosen, rows)) continue;  // the same for all threads
    if (!loaded) {  // while the rows are on their way
      loaded = true;
      _Pragma("unroll 6") for (int i = THREAD; i < HEADS * PADDED / 4; i += BLOCK) {
        int h = i / (PADDED / 4), k = i % (PADDED / 4) * 4;
        const float* from = q + ((long long)t * heads + head0 + h) * WIDTH + k;
        bool inside = head0 + h < heads;
        UNROLL for (int j = 0; j < 4; j++)
          split_f16(inside && k + j < WIDTH ? from[j] : 0.0f, &q_high[h * PITCH + k + j], &q_low[h * PITCH + k + j]);
      }
    }
    stage_wait();
    barrier();
    {  // scores: each warp of the group takes its part of the depth for all keys
      float high[KEYS / 16 * TILE_ACC], low[KEYS / 16 * TILE_ACC];
      UNROLL for (int i = 0; i < KEYS / 16 * TILE_ACC; i++) high[i] = low[i] = 0;
      _Pragma("unroll 1") for (int k = member * 16; k < PADDED; k += GROUP * 16) {
        TileA a = tile_a(q_high + group * 16 * PITCH + k, 2 * PITCH), b = tile_a(q_low + group * 16 * PITCH + k, 2 * PITCH);
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
          TileB row = tile_b(rows + n * 16 * PITCH + k, 2 * PITCH);
          tile_f16(high + n * TILE_ACC, a, row);
          tile_f16(low + n * TILE_ACC, b, row);
        }
      }
      UNROLL for (int n = 0; n < KEYS / 16; n++) UNROLL for (int i = 0; i < TILE_ACC; i++)
        score[(member * HEADS + group * 16 + tile_row(i)) * S_PITCH + n * 16 + tile_col(i)] =
            fmaf(low[n * TILE_ACC + i], 1.0f / 2048.0f, high[n * TILE_ACC + i]) * scale;
    }
    barrier();
    UNROLL for (int i = 0; i < MY_HEADS; i++) {
      int h = WARP + i * WARPS;
      float higher = largest[i], total = 0, mine[KEYS_PER_LANE];
      UNROLL for (int j = 0; j < KEYS_PER_LANE; j++) {
        int k = LANE + j * LANES;
        mine[j] = MINUS_INFINITY;
        if (k < KEYS && chosen[k] >= 0) {
          mine[j] = score[h * S_PITCH + k];
          UNROLL for (int m = 1; m < GROUP; m++) mine[j] += score[(m * HEADS + h) * S_PITCH + k];
        }
        higher = fmaxf(higher, mine[j]);
      }
      higher = lane_max(higher, LANES);  // finite: a row of this chunk is valid
      UNROLL for (int j = 0; j < KEYS_PER_LANE; j++) {
        int k = LANE + j * LANES;
        if (k >= KEYS) break;
        float p = expf(mine[j] - higher);
        total += p;
        u16 high = f32_to_f16(p * P_SCALE);
        p_high[h * P_PITCH + k] = high;
        p_low[h * P_PITCH + k] = f32_to_f16(p * P_SCALE - f16_to_f32(high));
      }
      float factor = expf(largest[i] - higher);
      sum[i] = sum[i] * factor + lane_sum(total, LANES);
      largest[i] = higher;
      if (LANE == 0) shrink[h] = factor;
    }
    barrier();
    UNROLL for (int i = 0; i < TILE_ACC; i++) {
      float factor = shrink[group * 16 + tile_row(i)];
      UNROLL for (int m = 0; m < MY_TILES; m++) acc[m * TILE_ACC + i] *= factor;
    }
    UNROLL for (int k = 0; k < KEYS; k += 16) {
      TileA high = tile_a(p_high + group * 16 * P_PITCH + k, 2 * P_PITCH), low = tile_a(p_low + group * 16 * P_PITCH + k, 2 * P_PITCH);
      UNROLL for (int m = 0; m < MY_TILES; m++) {
        int tile = member + m * GROUP;
        if (tile < R_TILES) {
          TileB b = tile_b_f16_transposed(rows + k * PITCH + tile * 16, 2 * PITCH);
          tile_f16(acc + m * TILE_ACC, high, b);
          tile_f16(acc + m * TILE_ACC, low, b);
        }
      }
    }
    barrier();
  }
  float* ml = part_ml + (((long long)t * splits + BLOCK_X) * heads + head0) * 2;
  UNROLL for (int i = 0; i < MY_HEADS; i++) {
    int h = WARP + i * WARPS;
    if (LANE == 0) shrink[h] = sum[i];
    if (LANE == 0 && splits > 1 && head0 + h < heads) ml[2 * h] = largest[i], ml[2 * h + 1] = sum[i];
  }
  barrier();
  UNROLL for (int i = 0; i < TILE_ACC; i++) {
    int h = group * 16 + tile_row(i), head = head0 + h, r0 = member * 16 + tile_col(i);
    float total = shrink[h], factor = (splits == 1 ? 1.0f / total : 1.0f) / P_SCALE;
    float* row = splits == 1 ? out + ((long long)t * heads + head) * RANK
                             : part + (((long long)t * splits + BLOCK_X) * heads + head) * RANK;
    if (head < heads && (total > 0.0f || splits > 1))  // a part without rows is zero
      UNROLL for (int m = 0; m < MY_TILES; m++)
        if (r0 + m * GROUP * 16 < RANK) row[r0 + m * GROUP * 16] = acc[m * TILE_ACC + i] * factor;
  }
}
