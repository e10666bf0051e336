// Products with weights of any type: a tile is decoded into shared memory and multiplied in f32. Legible, not fast.

#define WIDTH 64  // tokens and output rows of a tile
#define DEPTH 32
#define PITCH (WIDTH + 4)
#define LINES 8  // of DEPTH threads: each brings every eighth row
#define EACH (WIDTH / LINES)

// This thread's values at k0 + THREAD % DEPTH. w: the tile's n_rows rows.
DEVICE void load_part(const u8* w, const s8* grid, const float* x, const int* x_row, int k0, int n_in, int n_rows,
                      long long x_stride, float* w_value, float* x_value) {
  int k = k0 + THREAD % DEPTH, line = THREAD / DEPTH;
  UNROLL for (int i = 0; i < EACH; i++) {
    int row = imin(i * LINES + line, n_rows - 1);
    const u8* block = w + ((long long)row * (n_in / BLOCK_VALUES) + k / BLOCK_VALUES) * BLOCK_BYTES;
    w_value[i] = k < n_in ? DECODE(block, k % BLOCK_VALUES, grid) : 0.0f;
    x_value[i] = k < n_in ? x[x_row[i * LINES + line] * x_stride + k] : 0.0f;
  }
}

// A thread makes the tokens 4 * (THREAD / 16) + 0 .. 3 times the output rows 4 * (THREAD % 16) + 0 .. 3.
KERNEL BOUNDS(256, 2) JOIN(matmul_decoded_, TYPE)(const u8* w, const s8* grid, const float* x, const int* order,
                                                  const int* tile_expert, const int* tile_first, const int* first, float* y,
                                                  int n_tokens, int n_in, int n_out, int n_matrices, int x_div,
                                                  long long x_stride, long long y_stride) {
  SHARED float ws[DEPTH * PITCH], xs[DEPTH * PITCH];
  SHARED int pairs[WIDTH], x_row[WIDTH];
  Rows rows;
  wait_for_inputs();
  if (!tile_rows(tile_expert, tile_first, first, n_tokens, WIDTH, &rows)) return;
  for (int i = THREAD; i < WIDTH; i += N_THREADS) {
    pairs[i] = pair_of(order, &rows, imin(i, rows.count - 1), n_matrices);
    x_row[i] = pairs[i] / x_div;
  }
  barrier();
  int row0 = BLOCK_X * WIDTH, column = THREAD % DEPTH, line = THREAD / DEPTH;
  w += (rows.matrix * n_out + row0) * (n_in / BLOCK_VALUES) * BLOCK_BYTES;
  float acc[16], w_value[EACH], x_value[EACH];
  UNROLL for (int i = 0; i < 16; i++) acc[i] = 0;
  load_part(w, grid, x, x_row, 0, n_in, n_out - row0, x_stride, w_value, x_value);
  for (int k0 = 0; k0 < n_in; k0 += DEPTH) {
    UNROLL for (int i = 0; i < EACH; i++) {
      ws[column * PITCH + i * LINES + line] = w_value[i];
      xs[column * PITCH + i * LINES + line] = x_value[i];
    }
    barrier();
    load_part(w, grid, x, x_row, k0 + DEPTH, n_in, n_out - row0, x_stride, w_value, x_value);  // comes during the products
    float part[16];  // sums of sums: shorter chains of roundings
    UNROLL for (int i = 0; i < 16; i++) part[i] = 0;
    _Pragma("unroll 8") for (int j = 0; j < DEPTH; j++) {
      F4 a = *(const F4*)(xs + j * PITCH + THREAD / 16 * 4), b = *(const F4*)(ws + j * PITCH + THREAD % 16 * 4);
      float t[4] = {a.x, a.y, a.z, a.w}, r[4] = {b.x, b.y, b.z, b.w};
      UNROLL for (int i = 0; i < 16; i++) part[i] = fmaf(t[i / 4], r[i % 4], part[i]);
    }
    UNROLL for (int i = 0; i < 16; i++) acc[i] += part[i];
    barrier();
  }
  UNROLL for (int i = 0; i < 16; i++) {
    int t = THREAD / 16 * 4 + i / 4, r = row0 + THREAD % 16 * 4 + i % 4;
    if (t < rows.count && r < n_out) y[pairs[t] * y_stride + r] = acc[i];
  }
}
