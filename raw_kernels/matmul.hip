// Products of many tokens with quantised weights on the matrix unit: int8 tiles, the scales applied in f32. Layout of weights
// and activations: matvec.hip. Rows of tokens: rows.hip.
//
// A block makes WIDTH tokens by WIDTH output rows, DEPTH values of k at a time. While one part is multiplied the next one is on
// its way: activations (and int8 weights) straight into the other of STAGES buffers, 2-bit weights and scales into registers.
// With STAGES 1 (64 KiB of shared memory) the copies wait for the products. Dynamic shared memory: matmul_bytes() in matmul.py.

#define WIDTH 64
#define DEPTH 256
#define PITCH (DEPTH + 16)  // bytes of a staged row; shifts the banks
#define BLOCK 128
#define WARPS (BLOCK / LANES)
#define TOKEN_TILES 2  // a warp's share: 2 tiles of tokens by ROW_TILES tiles of output rows
#define ROW_TILES (8 / WARPS)
#define N_ACC (TOKEN_TILES * ROW_TILES * TILE_ACC)
#ifdef IS_Q2_K
#define SCALE_PITCH 1  // one scale per staged row
#define SUM_PITCH 24   // f16 numbers: 16 sums, or minima, of a staged row
#define UNITS (WIDTH * DEPTH / 64 / BLOCK)  // of 16 bytes, per thread
#else
#define SCALE_PITCH 9  // 8 scales per staged row
#define MAGIC 0x4b400000  // the bits of 1.5 * 2^23: added to a sum of 32 products they are a float that is exactly that much larger
#define SUM_PITCH 0
#endif

typedef struct {
#ifdef IS_Q2_K
  I4 q[UNITS];
  I2 scales[UNITS];
  u32 dm;
  float xd;
#else
  u16 d[8];  // of weight row THREAD, or of token THREAD - WIDTH
#endif
} Fetched;

// The part of weights and scales that goes through registers. pairs: the tokens' rows.
DEVICE Fetched fetch(const u8* w, const u8* scales, const u16* d, const void* x_d, long long row0, int n_rows, const int* x_row,
                     int k0) {
  Fetched f;
#ifdef IS_Q2_K
  UNROLL for (int i = 0; i < UNITS; i++) {
    int u = THREAD + i * BLOCK;
    long long row = row0 + imin(u >> 2, n_rows - 1);
    f.q[i] = *(const I4*)(w + row * (N_IN / 4) + k0 / 4 + (u & 3) * 16);
    f.scales[i] = *(const I2*)(scales + row * (N_IN / 16) + k0 / 16 + (u & 2) * 4);
  }
  int r = THREAD % WIDTH;
  f.dm = ((const u32*)d)[(row0 + imin(r, n_rows - 1)) * (N_IN / 256) + k0 / 256];
  f.xd = ((const float*)x_d)[(long long)x_row[r] * (N_IN / 256) + k0 / 256];
#else
  (void)w, (void)scales;
  int r = THREAD % WIDTH;
  const u16* from = THREAD < WIDTH ? d + (row0 + imin(r, n_rows - 1)) * (N_IN / 32) : (const u16*)x_d + (long long)x_row[r] * (N_IN / 32);
  UNROLL for (int i = 0; i < 8; i++) f.d[i] = k0 / 32 + i < N_IN / 32 ? from[k0 / 32 + i] : (u16)0;
#endif
  return f;
}

// What goes straight into shared memory: zeros beyond the end of a row.
DEVICE void copy_part(s8* xs, s8* ws, short* xsums, const u8* w, const s8* x, const short* sums, long long row0, int n_rows,
                      const int* x_row, int k0) {
  UNROLL for (int i = 0; i < WIDTH * DEPTH / 16 / BLOCK; i++) {
    int u = THREAD + i * BLOCK, r = u / (DEPTH / 16), k = u % (DEPTH / 16) * 16;
    bool inside = N_IN % DEPTH == 0 || k0 + k < N_IN;
    stage16(xs + r * PITCH + k, x + (inside ? (long long)x_row[r] * N_IN + k0 + k : 0), inside);
#ifndef IS_Q2_K
    stage16(ws + r * PITCH + k, w + (inside ? (row0 + imin(r, n_rows - 1)) * N_IN + k0 + k : 0), inside);
#endif
  }
#ifdef IS_Q2_K
  (void)ws, (void)w, (void)row0, (void)n_rows;
  stage16(xsums + (THREAD >> 1) * SUM_PITCH + (THREAD & 1) * 8,
          sums + (long long)x_row[THREAD >> 1] * (N_IN / 16) + k0 / 16 + (THREAD & 1) * 8, true);
#else
  (void)xsums, (void)sums;
#endif
}

KERNEL BOUNDS(BLOCK, 3) JOIN(matmul_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                            const short* sums, const int* order, const int* tile_expert, const int* tile_first,
                                            const int* first, float* y, int n_tokens, int n_out, int n_matrices, int x_div,
                                            long long y_stride) {
  DYNAMIC_SHARED(memory);
  s8* xs = (s8*)memory;                // [STAGES][WIDTH, PITCH]
  s8* ws = xs + STAGES * WIDTH * PITCH;  // Q8_0: [STAGES][WIDTH, PITCH]; Q2_K: [WIDTH, PITCH]
#ifdef IS_Q2_K
  u16* xsums = (u16*)(ws + WIDTH * PITCH);             // [STAGES][WIDTH, SUM_PITCH] int16, then f16
  u16* mins = xsums + STAGES * WIDTH * SUM_PITCH;      // [WIDTH, SUM_PITCH] f16, exact
  float* wd = (float*)(mins + WIDTH * SUM_PITCH);
  float* wm = wd + WIDTH;
  float* xd = wm + WIDTH;
#else
  u16* xsums = 0;
  float* wd = (float*)(ws + STAGES * WIDTH * PITCH);  // [WIDTH, SCALE_PITCH]
  float* xd = wd + WIDTH * SCALE_PITCH;
#endif
  int* pairs = (int*)(xd + WIDTH * SCALE_PITCH);  // [WIDTH]
  int* x_row = pairs + WIDTH;                     // [WIDTH]
  Rows rows;
  if (!tile_rows(tile_expert, tile_first, first, n_tokens, WIDTH, &rows)) return;
  for (int i = THREAD; i < WIDTH; i += BLOCK) {
    pairs[i] = pair_of(order, &rows, imin(i, rows.count - 1), n_matrices);
    x_row[i] = pairs[i] / x_div;
  }
  barrier();
  int column0 = BLOCK_X * WIDTH, n_rows = n_out - column0;
  long long row0 = rows.matrix * n_out + column0;
  int token_tile = WARP % 2 * TOKEN_TILES, row_tile = WARP / 2 * ROW_TILES;
  float total[N_ACC];
  UNROLL for (int i = 0; i < N_ACC; i++) total[i] = 0;

  Fetched f = fetch(w, scales, d, x_d, row0, n_rows, x_row, 0);
  copy_part(xs, ws, (short*)xsums, w, x, sums, row0, n_rows, x_row, 0);
  for (int k0 = 0, stage = 0; k0 < N_IN; k0 += DEPTH) {
    s8* x_now = xs + stage * WIDTH * PITCH;
#ifdef IS_Q2_K
    s8* w_now = ws;
    u16* sums_now = xsums + stage * WIDTH * SUM_PITCH;
    UNROLL for (int i = 0; i < UNITS; i++) {  // 16 bytes are 64 values; times their scale they fit 8 bits
      int u = THREAD + i * BLOCK, r = u >> 2, p = u & 3, half = p & 1;
      I4 q = f.q[i];
      s8* to = ws + r * PITCH + (p >> 1) * 128 + half * 16;
      UNROLL for (int j = 0; j < 4; j++) {
        int scale = ((u32)(j < 2 ? f.scales[i].x : f.scales[i].y) >> (8 * half + 16 * (j & 1))) & 255;
        I4 v = {(int)((u32)q.x >> 2 * j & 0x03030303u) * (scale & 15), (int)((u32)q.y >> 2 * j & 0x03030303u) * (scale & 15),
                (int)((u32)q.z >> 2 * j & 0x03030303u) * (scale & 15), (int)((u32)q.w >> 2 * j & 0x03030303u) * (scale & 15)};
        *(I4*)(to + 32 * j) = v;
        mins[r * SUM_PITCH + (p >> 1) * 8 + 2 * j + half] = f32_to_f16((float)(scale >> 4));
      }
    }
    if (THREAD < WIDTH) wd[THREAD] = f16_to_f32((u16)f.dm), wm[THREAD] = f16_to_f32((u16)(f.dm >> 16)), xd[THREAD] = f.xd;
    stage_wait();
    u16* mine = sums_now + (THREAD >> 1) * SUM_PITCH + (THREAD & 1) * 8;  // what this thread has copied itself
    UNROLL for (int i = 0; i < 8; i++) mine[i] = f32_to_f16((float)(short)mine[i]);
#else
    s8* w_now = ws + stage * WIDTH * PITCH;
    float* to = THREAD < WIDTH ? wd : xd;
    UNROLL for (int i = 0; i < 8; i++) to[THREAD % WIDTH * SCALE_PITCH + i] = f16_to_f32(f.d[i]);
    stage_wait();
#endif
    barrier();
    int next = k0 + DEPTH;
    stage = STAGES - 1 - stage;
    if (next < N_IN) {
      f = fetch(w, scales, d, x_d, row0, n_rows, x_row, next);
      if (STAGES == 2)
        copy_part(xs + stage * WIDTH * PITCH, ws + stage * WIDTH * PITCH, (short*)xsums + stage * WIDTH * SUM_PITCH, w, x, sums, row0,
                  n_rows, x_row, next);
    }

#ifdef IS_Q2_K
    int acc[N_ACC];  // exact over the 256 values
    UNROLL for (int i = 0; i < N_ACC; i++) acc[i] = 0;
    _Pragma("unroll 2") for (int k = 0; k < DEPTH; k += 32) {
      TileA xa[TOKEN_TILES];
      UNROLL for (int a = 0; a < TOKEN_TILES; a++) xa[a] = tile_a(x_now + (token_tile + a) * TILE * PITCH + k, PITCH);
      UNROLL for (int b = 0; b < ROW_TILES; b++) {
        TileB wb = tile_b(w_now + (row_tile + b) * TILE * PITCH + k, PITCH);
        UNROLL for (int a = 0; a < TOKEN_TILES; a++) tile_s8(acc + (b * TOKEN_TILES + a) * TILE_ACC, xa[a], wb);
      }
    }
    UNROLL for (int b = 0; b < ROW_TILES; b++) UNROLL for (int a = 0; a < TOKEN_TILES; a++) {
      int token = (token_tile + a) * TILE, row = (row_tile + b) * TILE, at = (b * TOKEN_TILES + a) * TILE_ACC;
      float min_acc[TILE_ACC];
      UNROLL for (int i = 0; i < TILE_ACC; i++) min_acc[i] = 0;
      tile_f16(min_acc, tile_a(sums_now + token * SUM_PITCH, 2 * SUM_PITCH), tile_b(mins + row * SUM_PITCH, 2 * SUM_PITCH));
      UNROLL for (int i = 0; i < TILE_ACC; i++) {
        int t = token + tile_row(i), r = row + tile_col(i);
        total[at + i] += xd[t] * (wd[r] * (float)acc[at + i] - wm[r] * min_acc[i]);
      }
    }
#else
    _Pragma("unroll 1") for (int k = 0; k < DEPTH / 32; k++) {
      TileA xa[TOKEN_TILES];
      UNROLL for (int a = 0; a < TOKEN_TILES; a++) xa[a] = tile_a(x_now + (token_tile + a) * TILE * PITCH + 32 * k, PITCH);
      UNROLL for (int b = 0; b < ROW_TILES; b++) {
        TileB wb = tile_b(w_now + (row_tile + b) * TILE * PITCH + 32 * k, PITCH);
        UNROLL for (int a = 0; a < TOKEN_TILES; a++) {
          int acc[TILE_ACC];
          UNROLL for (int i = 0; i < TILE_ACC; i++) acc[i] = MAGIC;
          tile_s8(acc, xa[a], wb);
          UNROLL for (int i = 0; i < TILE_ACC; i++) {
            int t = (token_tile + a) * TILE + tile_row(i), r = (row_tile + b) * TILE + tile_col(i);
            float* sum = &total[(b * TOKEN_TILES + a) * TILE_ACC + i];
            *sum = fmaf(as_f32((u32)acc[i]) - 12582912.0f, wd[r * SCALE_PITCH + k] * xd[t * SCALE_PITCH + k], *sum);
          }
        }
      }
    }
#endif
    barrier();
    if (STAGES == 1 && next < N_IN) copy_part(xs, ws, (short*)xsums, w, x, sums, row0, n_rows, x_row, next);
  }
  UNROLL for (int b = 0; b < ROW_TILES; b++) UNROLL for (int a = 0; a < TOKEN_TILES; a++) UNROLL for (int i = 0; i < TILE_ACC; i++) {
    int t = (token_tile + a) * TILE + tile_row(i), r = (row_tile + b) * TILE + tile_col(i);
    if (t < rows.count && r < n_rows) y[pairs[t] * y_stride + column0 + r] = total[(b * TOKEN_TILES + a) * TILE_ACC + i];
  }
}
