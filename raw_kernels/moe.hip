// Router (router.hip), sorting of tokens by expert, and the weighted sum of experts' outputs.

// Dynamic shared memory: the candidates.
KERNEL select_experts_f32(const float* score, int* experts, int n, int n_chosen) {
  wait_for_inputs();
  DYNAMIC_SHARED(memory);
  choose(score + (long long)BLOCK_X * n, (u64*)memory, n, n_chosen, experts + (long long)BLOCK_X * n_chosen);
}

KERNEL route_f32(const float* logits, const float* bias, float* probs, float* biased, int* experts, float* weights,
                 float* weights_norm, float* weights_scaled, int n, int n_chosen, int normalise, float min_sum, float scale,
                 int first, int count) {
  wait_for_inputs();
  DYNAMIC_SHARED(memory);
  Routing r = start_route(bias, n, n_chosen, memory);
  route(r, logits, probs, biased, experts, weights, weights_norm, weights_scaled, BLOCK_X, n, n_chosen, normalise, min_sum, scale, first,
        count);
}

// Pairs in order of their expert, equal ones in their own order, without those of expert -1. Block e finds where expert e's run
// begins and writes it.
KERNEL moe_sort(const int* experts, int* order, int* first, int n_pairs, int n_experts) {
  wait_for_inputs();
  int expert = BLOCK_X, before = 0, begin, total;
  for (int i = THREAD; i < n_pairs; i += N_THREADS) before += experts[i] >= 0 && experts[i] < expert;
  block_scan(before, &begin);
  if (THREAD == 0) first[expert] = begin;
  for (int i0 = 0; i0 < n_pairs; i0 += N_THREADS) {
    int i = i0 + THREAD, mine = i < n_pairs && experts[i] == expert;
    int at = begin + block_scan(mine, &total);
    if (mine) order[at] = i;
    begin += total;
  }
  if (THREAD == 0 && expert == n_experts - 1) first[n_experts] = begin;
}

// y[pair] = 0 for the pairs of expert -1, which have no tile. One block per pair; y rows at y_stride elements.
KERNEL zero_pairs_f32(const int* experts, float* y, int n, long long y_stride) {
  wait_for_inputs();
  if (experts[BLOCK_X] >= 0) return;
  for (int i = THREAD; i < n; i += N_THREADS) y[BLOCK_X * y_stride + i] = 0;
}

// The runs cut into tiles of `width` pairs; tiles that are not needed get expert -1. One block.
KERNEL moe_tiles(const int* first, int* tile_expert, int* tile_first, int n_experts, int n_tiles, int width) {
  wait_for_inputs();
  int done = 0, total;
  for (int e0 = 0; e0 < n_experts; e0 += N_THREADS) {
    int e = e0 + THREAD, run = e < n_experts ? first[e + 1] - first[e] : 0, tiles = (run + width - 1) / width;
    int at = done + block_scan(tiles, &total);
    for (int i = 0; i < tiles; i++) tile_expert[at + i] = e, tile_first[at + i] = first[e] + i * width;
    done += total;
  }
  for (int i = done + THREAD; i < n_tiles; i += N_THREADS) tile_expert[i] = -1;
}

// out[t, i] = sum over k, in order, of y[t, k, i] * weights[t, k]. One thread per output value.
KERNEL combine_experts_f32(const float* y, const float* weights, float* out, int n_tokens, int n_chosen, int n) {
  wait_for_inputs();
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i >= (long long)n_tokens * n) return;
  long long t = i / n;
  float sum = 0;
  for (int k = 0; k < n_chosen; k++) sum += y[(t * n_chosen + k) * n + i % n] * weights[t * n_chosen + k];
  out[i] = sum;
}

// Places among the `count` experts that a rank holds from `first` on; -1: not here.
KERNEL local_experts(const int* experts, int* local, int n_pairs, int first, int count) {
  wait_for_inputs();
  int i = BLOCK_X * N_THREADS + THREAD;
  if (i < n_pairs) local[i] = experts[i] >= first && experts[i] < first + count ? experts[i] - first : -1;
}
