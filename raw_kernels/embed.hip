// Rows of a (quantised) table, decoded.

// y[t] = row tokens[t] of the table, or row t where tokens is null.
KERNEL JOIN(embed_, TYPE)(const u8* table, const s8* grid, const int* tokens, float* y, int n_rows, int n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i >= (long long)n_rows * n) return;
  int t = (int)(i / n), k = (int)(i % n);
  long long row = tokens ? tokens[t] : t;
  const u8* block = table + (row * (n / BLOCK_VALUES) + k / BLOCK_VALUES) * BLOCK_BYTES;
  y[i] = DECODE(block, k % BLOCK_VALUES, grid);
}
