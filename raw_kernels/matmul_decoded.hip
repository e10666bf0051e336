// Products with weights of any type: a tile is decoded into shared memory and multiplied in f32. Legible, not fast.

#define WIDTH 32  // tokens, output rows and depth of a tile
#define PITCH (WIDTH + 1)

KERNEL BOUNDS(256, 2) JOIN(matmul_decoded_, TYPE)(const u8* w, const s8* grid, const float* x, const int* order,
                                                  const int* tile_expert, const int* tile_first, const int* first, float* y,
                                                  int n_tokens, int n_in, int n_out, int n_matrices, int x_div,
                                                  long long x_stride, long long y_stride) {
  SHARED float ws[WIDTH * PITCH], xs[WIDTH * PITCH];
  Rows rows;
  if (!tile_rows(tile_expert, tile_first, first, n_tokens, WIDTH, &rows)) return;
  int row0 = BLOCK_X * WIDTH, column = THREAD % WIDTH, line = THREAD / WIDTH;  // 8 lines of 32 threads
  float acc[4] = {0, 0, 0, 0};  // token line + 8 i, output row `column`
  for (int k0 = 0; k0 < n_in; k0 += WIDTH) {
    int k = k0 + column;
    for (int i = line; i < WIDTH; i += 8) {
      float value = 0;
      if (k < n_in && row0 + i < n_out) {
        const u8* block = w + ((rows.matrix * n_out + row0 + i) * (n_in / BLOCK_VALUES) + k / BLOCK_VALUES) * BLOCK_BYTES;
        value = DECODE(block, k % BLOCK_VALUES, grid);
      }
      ws[i * PITCH + column] = value;
      bool inside = k < n_in && i < rows.count;
      xs[i * PITCH + column] = inside ? x[pair_of(order, &rows, i, n_matrices) / x_div * x_stride + k] : 0.0f;
    }
    barrier();
    float part[4] = {0, 0, 0, 0};  // sums of sums: shorter chains of roundings
    UNROLL for (int j = 0; j < WIDTH; j++) UNROLL for (int i = 0; i < 4; i++)
      part[i] = fmaf(xs[(line + 8 * i) * PITCH + j], ws[column * PITCH + j], part[i]);
    UNROLL for (int i = 0; i < 4; i++) acc[i] += part[i];
    barrier();
  }
  for (int i = 0; i < 4; i++) {
    int j = line + 8 * i;
    if (j < rows.count && row0 + column < n_out) y[pair_of(order, &rows, j, n_matrices) * y_stride + row0 + column] = acc[i];
  }
}
