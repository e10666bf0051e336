// Which rows of activations a block of a matrix product handles, the same for every tile width.
//
// Plain and per-head products: matrix BLOCK_Z, tokens from BLOCK_Y * width on; token t's row is pair t * n_matrices + matrix.
// Routed experts: moe_sort has put the pairs (token, choice) in order of their expert, expert e's in order[first[e]..first[e+1]);
// moe_tiles has cut these runs into tiles of `width`: tile_expert (-1: none) and tile_first.
// Pair p reads row p / x_div of x and writes row p of y.

typedef struct { long long matrix; int first, count; } Rows;

DEVICE bool tile_rows(const int* tile_expert, const int* tile_first, const int* first, int n_tokens, int width, Rows* rows) {
  if (tile_expert) {
    int expert = tile_expert[BLOCK_Y];
    if (expert < 0) return false;
    rows->matrix = expert;
    rows->first = tile_first[BLOCK_Y];
    rows->count = imin(width, first[expert + 1] - rows->first);
  } else {
    rows->matrix = BLOCK_Z;
    rows->first = BLOCK_Y * width;
    rows->count = imin(width, n_tokens - rows->first);
  }
  return true;
}
DEVICE int pair_of(const int* order, const Rows* rows, int j, int n_matrices) {
  return order ? order[rows->first + j] : (rows->first + j) * n_matrices + (int)rows->matrix;
}
