// Products of many tokens with quantised weights on the matrix unit: int8 tiles, the scales applied in f32. Layout of weights
// and activations: dots.hip. Rows of tokens: rows.hip.
//
// A block makes BLOCK_TOKENS tokens by ROWS output rows, DEPTH values of k at a time (a divisor of N_IN; 256 for Q2_K).
// A warp's share is TOKEN_TILES by ROW_TILES tiles; those past the last token are left out. While one part is multiplied the
// next one is on its way into the other of STAGES buffers; with STAGES 1 (64 KiB of shared memory) the copies wait for the
// products. 2-bit weights are staged as they are, and unpacked by the warp that multiplies them. Dynamic shared memory:
// matmul_bytes() in matmul.py.

#define ROWS 128
#ifdef IS_Q2_K
#define W_BYTES 64  // of a staged row
#define D_FLOATS 2  // of a staged row: d and dmin
#define XD_FLOATS 1
#else
#define W_BYTES DEPTH
#define D_FLOATS (DEPTH / 32)
#define XD_FLOATS (DEPTH / 32)
#endif
#define W_ROW_BYTES (N_IN / DEPTH * W_BYTES)
#define X_PITCH (DEPTH + 16)  // bytes from row to row; 16 more than there are shift the banks
#define W_PITCH (W_BYTES + 16)
#define SUM_PITCH 24  // f16 numbers: 16 sums, or minima, of a staged row
#define TOKEN_TILES (BLOCK_TOKENS < 64 ? BLOCK_TOKENS / TILE : 4)
#define ROW_TILES 2
#define WARP_TOKENS (TOKEN_TILES * TILE)
#define WARP_ROWS (ROW_TILES * TILE)
#define WARPS (BLOCK_TOKENS / WARP_TOKENS * (ROWS / WARP_ROWS))
#define BLOCK (WARPS * LANES)
#define MINE ((ROWS + BLOCK_TOKENS + BLOCK - 1) / BLOCK)
#define N_ACC (TOKEN_TILES * ROW_TILES * TILE_ACC)
#define MAGIC 0x4b400000  // the bits of 1.5 * 2^23: where sums of products start, so that they are the bits of a float ...
#define MAGIC_F32 12582912.0f  // ... that is exactly so much larger

// One staged part, of STAGE_BYTES.
typedef struct {
  s8* x;          // [BLOCK_TOKENS, X_PITCH]
  s8* w;          // [ROWS, W_PITCH]
  float* d;       // [D_FLOATS, ROWS]
  float* xd;      // [XD_FLOATS, BLOCK_TOKENS]
  u16* sums;      // [BLOCK_TOKENS, SUM_PITCH] Q2_K: int16, then f16
  u16* mins;      // [ROWS, SUM_PITCH]   Q2_K: f16, exact
  u8* scales;     // [ROWS, 16]          Q2_K
} Stage;
#define PLAIN_BYTES (BLOCK_TOKENS * X_PITCH + ROWS * W_PITCH + 4 * (D_FLOATS * ROWS + XD_FLOATS * BLOCK_TOKENS))
#ifdef IS_Q2_K
#define STAGE_BYTES (PLAIN_BYTES + 2 * SUM_PITCH * (BLOCK_TOKENS + ROWS) + 16 * ROWS)
#else
#define STAGE_BYTES PLAIN_BYTES
#endif
DEVICE Stage stage_at(char* memory) {
  Stage s;
  s.x = (s8*)memory;
  s.w = s.x + BLOCK_TOKENS * X_PITCH;
  s.d = (float*)(s.w + ROWS * W_PITCH);
  s.xd = s.d + D_FLOATS * ROWS;
  s.sums = (u16*)(s.xd + XD_FLOATS * BLOCK_TOKENS);
  s.mins = s.sums + BLOCK_TOKENS * SUM_PITCH;
  s.scales = (u8*)(s.mins + ROWS * SUM_PITCH);
  return s;
}

// What a thread brings through registers: scales of weight rows and of tokens.
#ifdef IS_Q2_K
typedef struct { u32 d; float xd; } Fetched;  // d and dmin of weight row THREAD
DEVICE Fetched fetch(const u16* d, const void* x_d, int n_rows, const int* x_row, int k0) {
  Fetched f;
  f.d = ((const u32*)d)[imin(THREAD, n_rows - 1) * (N_IN / 256) + k0 / 256];
  f.xd = ((const float*)x_d)[(long long)x_row[THREAD % BLOCK_TOKENS] * (N_IN / 256) + k0 / 256];
  return f;
}
DEVICE void put(Fetched f, Stage s) {
  if (THREAD < ROWS) s.d[THREAD] = f16_to_f32((u16)f.d), s.d[ROWS + THREAD] = f16_to_f32((u16)(f.d >> 16));
  if (THREAD < BLOCK_TOKENS) s.xd[THREAD] = f.xd;
}
#else
#if DEPTH == 32
typedef u16 Scales;
DEVICE u16 scale_at(const Scales* s, int k) { return s[k]; }
#else
typedef struct __attribute__((aligned(DEPTH / 16))) { u32 pair[DEPTH / 64]; } Scales;  // one load, taken apart when it is there
DEVICE u16 scale_at(const Scales* s, int k) { return (u16)(s->pair[k / 2] >> 16 * (k % 2)); }
#endif
typedef struct { Scales row[MINE]; } Fetched;  // of rows THREAD, THREAD + BLOCK, ... : ROWS of weights, then BLOCK_TOKENS
DEVICE Fetched fetch(const u16* d, const void* x_d, int n_rows, const int* x_row, int k0) {
  Fetched f;
  UNROLL for (int i = 0; i < MINE; i++) {
    int r = THREAD + i * BLOCK;
    const u16* from = r < ROWS ? d + imin(r, n_rows - 1) * (N_IN / 32)
                               : (const u16*)x_d + (long long)x_row[(r - ROWS) % BLOCK_TOKENS] * (N_IN / 32);
    f.row[i] = *(const Scales*)(from + k0 / 32);
  }
  return f;
}
DEVICE void put(Fetched f, Stage s) {
  UNROLL for (int i = 0; i < MINE; i++) UNROLL for (int k = 0; k < DEPTH / 32; k++) {
    int r = THREAD + i * BLOCK;
    float value = f16_to_f32(scale_at(&f.row[i], k));
    if (r < ROWS) s.d[k * ROWS + r] = value;
    else if (r < ROWS + BLOCK_TOKENS) s.xd[k * BLOCK_TOKENS + r - ROWS] = value;
  }
}
#endif

// Where the rest comes from, which goes straight into shared memory: rows of this block's weights, and `tokens` tokens.
typedef struct {
  const u8 *w, *scales;
  const s8* x;
  const short* sums;
  const int* x_row;
  int n_rows, tokens;
} Source;

DEVICE void copy(Stage s, Source from, int k0) {
  UNROLL for (int i0 = 0; i0 < BLOCK_TOKENS * DEPTH / 16; i0 += BLOCK) {
    int i = i0 + THREAD, r = i / (DEPTH / 16), k = i % (DEPTH / 16) * 16;
#ifdef IS_Q2_K
    int to = k ^ (k0 / 256 & 1) * 64;  // blocks.hip: odd blocks
#else
    int to = k;
#endif
    if (r < from.tokens) stage16(s.x + r * X_PITCH + to, from.x + (long long)from.x_row[r] * N_IN + k0 + k, true);
  }
  UNROLL for (int i0 = 0; i0 < ROWS * W_BYTES / 16; i0 += BLOCK) {
    int i = i0 + THREAD, r = i / (W_BYTES / 16), k = i % (W_BYTES / 16) * 16;
    if (ROWS * W_BYTES / 16 % BLOCK == 0 || r < ROWS)
      stage16(s.w + r * W_PITCH + k, from.w + imin(r, from.n_rows - 1) * W_ROW_BYTES + k0 / DEPTH * W_BYTES + k, true);
  }
#ifdef IS_Q2_K
  if (THREAD < ROWS) stage16(s.scales + THREAD * 16, from.scales + imin(THREAD, from.n_rows - 1) * (N_IN / 16) + k0 / 16, true);
  if (THREAD < 2 * BLOCK_TOKENS)
    stage16(s.sums + (THREAD >> 1) * SUM_PITCH + (THREAD & 1) * 8,
            from.sums + (long long)from.x_row[THREAD >> 1] * (N_IN / 16) + k0 / 16 + (THREAD & 1) * 8, true);
#endif
}

#ifdef IS_Q2_K
// Sums and minima as f16 numbers, each thread those that it has copied itself.
DEVICE void convert(Stage s) {
  if (THREAD < 2 * BLOCK_TOKENS) {
    I4* mine = (I4*)(s.sums + (THREAD >> 1) * SUM_PITCH + (THREAD & 1) * 8);
    int two[4] = {mine->x, mine->y, mine->z, mine->w};
    UNROLL for (int i = 0; i < 4; i++)
      two[i] = (int)(f32_to_f16((float)(short)two[i]) | (u32)f32_to_f16((float)(two[i] >> 16)) << 16);
    I4 pairs = {two[0], two[1], two[2], two[3]};
    *mine = pairs;
  }
  if (THREAD < ROWS) {
    I4 bytes = *(const I4*)(s.scales + THREAD * 16);
    int four[4] = {bytes.x, bytes.y, bytes.z, bytes.w}, two[8];
    UNROLL for (int i = 0; i < 4; i++) {
      u32 high = (u32)four[i] >> 4 & 0x0f0f0f0fu;
      two[2 * i] = (int)f16_pair((high & 0xff) | (high & 0xff00) << 8);
      two[2 * i + 1] = (int)f16_pair((high >> 16 & 0xff) | high >> 24 << 16);
    }
    I4* to = (I4*)(s.mins + THREAD * SUM_PITCH);
    I4 first = {two[0], two[1], two[2], two[3]}, second = {two[4], two[5], two[6], two[7]};
    to[0] = first, to[1] = second;
  }
}

// total += the products of a warp's `tiles` tiles of tokens.
DEVICE void multiply(float* total, Stage s, int token0, int row0, int tiles) {
  int acc[N_ACC];  // exact over the 256 values
  UNROLL for (int i = 0; i < N_ACC; i++) acc[i] = MAGIC;
  UNROLL for (int half = 0; half < 2; half++) {  // of the packed bytes: 32, four values each
    TileB packed[ROW_TILES];
    UNROLL for (int b = 0; b < ROW_TILES; b++) packed[b] = tile_b(s.w + (row0 + b * TILE) * W_PITCH + 32 * half, W_PITCH);
    UNROLL for (int j = 0; j < 4; j++) {
      TileB wb[ROW_TILES];  // times their scale they fit 8 bits
      UNROLL for (int b = 0; b < ROW_TILES; b++) UNROLL for (int i = 0; i < TILE_B_WORDS; i++) {
        u32 four = ((const u32*)(s.scales + (row0 + b * TILE + tile_b_column(i)) * 16))[half * 2 + (j >> 1)];
        u32 scale = four >> (16 * (j & 1) + 8 * tile_b_half(i)) & 15;
        wb[b].r[i] = ((u32)packed[b].r[i] >> 2 * j & 0x03030303u) * scale;
      }
      UNROLL for (int a = 0; a < TOKEN_TILES; a++)
        if (a < tiles) {
          TileA xa = tile_a(s.x + (token0 + a * TILE) * X_PITCH + (j * 2 + half) * 32, X_PITCH);  // as blocks.hip places them
          UNROLL for (int b = 0; b < ROW_TILES; b++) tile_s8(acc + (a * ROW_TILES + b) * TILE_ACC, xa, wb[b]);
        }
    }
  }
  UNROLL for (int b = 0; b < ROW_TILES; b++) {
    TileB mins = tile_b(s.mins + (row0 + b * TILE) * SUM_PITCH, 2 * SUM_PITCH);
    UNROLL for (int a = 0; a < TOKEN_TILES; a++)
      if (a < tiles) {
        float less[TILE_ACC];
        UNROLL for (int i = 0; i < TILE_ACC; i++) less[i] = 0;
        tile_f16(less, tile_a(s.sums + (token0 + a * TILE) * SUM_PITCH, 2 * SUM_PITCH), mins);
        UNROLL for (int i = 0; i < TILE_ACC; i++) {
          int t = token0 + a * TILE + tile_row(i), r = row0 + b * TILE + tile_col(i), at = (a * ROW_TILES + b) * TILE_ACC + i;
          float part = fmaf(as_f32((u32)acc[at]), s.d[r], s.d[r] * -MAGIC_F32);  // sum * d, rounded once
          total[at] = fmaf(s.xd[t], fmaf(-s.d[ROWS + r], less[i], part), total[at]);
        }
      }
  }
}
#else
DEVICE void multiply(float* total, Stage s, int token0, int row0, int tiles) {
  _Pragma("unroll 1") for (int k = 0; k < DEPTH / 32; k++) {
    TileB wb[ROW_TILES];
    UNROLL for (int b = 0; b < ROW_TILES; b++) wb[b] = tile_b(s.w + (row0 + b * TILE) * W_PITCH + 32 * k, W_PITCH);
    UNROLL for (int a = 0; a < TOKEN_TILES; a++)
      if (a < tiles) {
        TileA xa = tile_a(s.x + (token0 + a * TILE) * X_PITCH + 32 * k, X_PITCH);
        UNROLL for (int b = 0; b < ROW_TILES; b++) {
          int acc[TILE_ACC];
          UNROLL for (int i = 0; i < TILE_ACC; i++) acc[i] = MAGIC;
          tile_s8(acc, xa, wb[b]);
          UNROLL for (int i = 0; i < TILE_ACC; i++) {
            int t = token0 + a * TILE + tile_row(i), r = row0 + b * TILE + tile_col(i), at = (a * ROW_TILES + b) * TILE_ACC + i;
            float part = fmaf(as_f32((u32)acc[i]), s.d[k * ROWS + r], s.d[k * ROWS + r] * -MAGIC_F32);  // sum * d, rounded once
            total[at] = fmaf(part, s.xd[k * BLOCK_TOKENS + t], total[at]);
          }
        }
      }
  }
}
#endif

KERNEL BOUNDS(BLOCK, 1) JOIN(matmul_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                            const short* sums, const int* order, const int* tile_expert, const int* tile_first,
                                            const int* first, float* y, int n_tokens, int n_out, int n_matrices, int x_div,
                                            long long y_stride) {
  DYNAMIC_SHARED(memory);
  int* pairs = (int*)(memory + STAGES * STAGE_BYTES);  // [BLOCK_TOKENS]
  int* x_row = pairs + BLOCK_TOKENS;                         // [BLOCK_TOKENS]
  Rows rows;
  wait_for_inputs();
  if (!tile_rows(tile_expert, tile_first, first, n_tokens, BLOCK_TOKENS, &rows)) return;
  for (int i = THREAD; i < BLOCK_TOKENS; i += BLOCK) {
    pairs[i] = pair_of(order, &rows, imin(i, rows.count - 1), n_matrices);
    x_row[i] = pairs[i] / x_div;
  }
  barrier();
  int column0 = BLOCK_X * ROWS, n_rows = n_out - column0, tokens = (rows.count + TILE - 1) / TILE * TILE;
  long long row0 = rows.matrix * n_out + column0;
#ifdef IS_Q2_K
  w += row0 * W_ROW_BYTES, scales += row0 * (N_IN / 16), d += row0 * (N_IN / 256 * 2);
#else
  w += row0 * W_ROW_BYTES, d += row0 * (N_IN / 32);
#endif
  int warp_token = BLOCK_TOKENS > WARP_TOKENS ? WARP / (ROWS / WARP_ROWS) * WARP_TOKENS : 0;
  int warp_row = WARP % (ROWS / WARP_ROWS) * WARP_ROWS, tiles = (tokens - warp_token) / TILE;
  float total[N_ACC];
  UNROLL for (int i = 0; i < N_ACC; i++) total[i] = 0;

  Source from = {w, scales, x, sums, x_row, n_rows, tokens};
  Fetched f = fetch(d, x_d, n_rows, x_row, 0);
  copy(stage_at(memory), from, 0);
  for (int k0 = 0, stage = 0; k0 < N_IN; k0 += DEPTH, stage = STAGES - 1 - stage) {
    Stage now = stage_at(memory + stage * STAGE_BYTES), other = stage_at(memory + (STAGES - 1 - stage) * STAGE_BYTES);
    put(f, now);
    stage_wait();
#ifdef IS_Q2_K
    convert(now);
#endif
    barrier();  // the part is there, and no one reads the other buffer any more
    int next = k0 + DEPTH;
    if (next < N_IN) f = fetch(d, x_d, n_rows, x_row, next);
    if (next < N_IN && STAGES == 2) copy(other, from, next);
    if (tiles >= TOKEN_TILES) multiply(total, now, warp_token, warp_row, TOKEN_TILES);
    else multiply(total, now, warp_token, warp_row, tiles);
    if (STAGES == 2) continue;
    barrier();
    if (next < N_IN) copy(now, from, next);
  }
  bool in_pairs = TILE_PAIRS && (((u64)y >> 2 | (u64)y_stride | (u64)n_out) & 1) == 0;
  UNROLL for (int at = 0; at < N_ACC; at += 2) {
    F2 pair = {total[at], total[at + 1]};
    UNROLL for (int j = 0; j < 2; j++) {
      int tile = at / TILE_ACC, i = at % TILE_ACC + j;
      int t = warp_token + tile / ROW_TILES * TILE + tile_row(i), r = warp_row + tile % ROW_TILES * TILE + tile_col(i);
      if (t >= rows.count || r >= n_rows || (in_pairs && j == 1)) continue;
      float* to = y + pairs[t] * y_stride + column0 + r;
      if (in_pairs) *(F2*)to = pair;
      else *to = total[at + j];
    }
  }
}
