// Router, sorting of tokens by expert, and the weighted sum of experts' outputs. One warp per token where not said otherwise.

// experts[t] = the n_chosen best of scores[t], best first. Dynamic shared memory: n floats.
DEVICE void choose(const float* score, int n, int n_chosen, int* chosen) {
  u64 last = ~0ull;  // each step takes the best that is worse than the last one
  for (int k = 0; k < n_chosen; k++) {
    u64 best = 0;
    _Pragma("unroll 4") for (int i = LANE; i < n; i += LANES) {
      u64 rank = ranked(score[i], i);
      if (rank < last && rank > best) best = rank;
    }
    last = lane_max_u64(best);
    if (LANE == 0) chosen[k] = (int)~(u32)last;
  }
}
KERNEL select_experts_f32(const float* score, int* experts, int n, int n_chosen) {
  choose(score + (long long)BLOCK_X * n, n, n_chosen, experts + BLOCK_X * n_chosen);
}

// probs = sigmoid(logits), biased = probs + bias; experts by biased; weights: probs of the chosen, renormalised, then scaled.
// Outputs that nobody reads may be null. min_sum: lower bound of the weights' sum.
KERNEL route_f32(const float* logits, const float* bias, float* probs, float* biased, int* experts, float* weights,
                 float* weights_norm, float* weights_scaled, int n, int n_chosen, int normalise, float min_sum, float scale) {
  DYNAMIC_SHARED(memory);
  float* score = (float*)memory;  // [n] biased
  float* prob = score + n;        // [n]
  int* chosen = (int*)(prob + n);  // [n_chosen]
  long long t = BLOCK_X;
  _Pragma("unroll 8") for (int i = LANE; i < n; i += LANES) {
    float p = 1.0f / (1.0f + expf(-logits[t * n + i]));
    prob[i] = p;
    score[i] = bias ? p + bias[i] : p;
    if (probs) probs[t * n + i] = p;
    if (biased) biased[t * n + i] = score[i];
  }
  barrier();
  choose(score, n, n_chosen, chosen);
  barrier();
  float sum = 0;
  for (int k = 0; k < n_chosen; k++) sum += prob[chosen[k]];
  sum = normalise ? fmaxf(sum, min_sum) : 1.0f;
  for (int k = LANE; k < n_chosen; k += LANES) {
    float p = prob[chosen[k]];
    experts[t * n_chosen + k] = chosen[k];
    if (weights) weights[t * n_chosen + k] = p;
    if (weights_norm) weights_norm[t * n_chosen + k] = p / sum;
    weights_scaled[t * n_chosen + k] = p / sum * scale;
  }
}

// Pairs in order of their expert, equal ones in their own order. Block e finds where expert e's run begins and writes it.
KERNEL moe_sort(const int* experts, int* order, int* first, int n_pairs, int n_experts) {
  int expert = BLOCK_X, before = 0, begin, total;
  for (int i = THREAD; i < n_pairs; i += N_THREADS) before += experts[i] < expert;
  block_scan(before, &begin);
  if (THREAD == 0) first[expert] = begin;
  if (THREAD == 0 && expert == n_experts - 1) first[n_experts] = n_pairs;
  for (int i0 = 0; i0 < n_pairs; i0 += N_THREADS) {
    int i = i0 + THREAD, mine = i < n_pairs && experts[i] == expert;
    int at = begin + block_scan(mine, &total);
    if (mine) order[at] = i;
    begin += total;
  }
}

// The runs cut into tiles of `width` pairs; tiles that are not needed get expert -1. One block.
KERNEL moe_tiles(const int* first, int* tile_expert, int* tile_first, int n_experts, int n_tiles, int width) {
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
  long long i = (long long)BLOCK_X * N_THREADS + THREAD;
  if (i >= (long long)n_tokens * n) return;
  long long t = i / n;
  float sum = 0;
  for (int k = 0; k < n_chosen; k++) sum += y[(t * n_chosen + k) * n + i % n] * weights[t * n_chosen + k];
  out[i] = sum;
}
