// The choice of experts (order.hip).

DEVICE u64 lane_read_u64(u64 x, int lane) { return (u64)(u32)lane_read((int)(x >> 32), lane) << 32 | (u32)lane_read((int)x, lane); }
// chosen[0..n_chosen) = the best of n scores, best first. Each warp finds the best of LANES neighbours, then the block the best of
// those: `best`, in shared memory, has room for CANDIDATES(n, n_chosen). A barrier comes last.
#define CANDIDATES(n, n_chosen) (((n) + LANES - 1) / LANES * imin(n_chosen, LANES))
DEVICE void choose(const float* score, u64* best, int n, int n_chosen, int* chosen) {
  int width = imin(n_chosen, LANES), candidates = CANDIDATES(n, n_chosen);
  for (int i = THREAD; i - LANE < n; i += N_THREADS) {
    u64 mine = i < n ? ranked(score[i], i) : (u64)LANE;  // past the end: below all, and no two equal
    int better = 0;
    _Pragma("unroll 8") for (int lane = 0; lane < LANES; lane++) better += lane_read_u64(mine, lane) > mine;
    if (better < width) best[i / LANES * width + better] = mine;
  }
  barrier();
  for (int i = THREAD; i < candidates; i += N_THREADS) {
    int better = 0;
    _Pragma("unroll 8") for (int j = 0; j < candidates; j++) better += best[j] > best[i];
    if (better < n_chosen && best[i] >= LANES) chosen[better] = (int)~(u32)best[i];
  }
  barrier();
}

// Shared memory of route(), as much as route() in moe.py says.
typedef struct {
  u64* best;     // [CANDIDATES(n, n_chosen)]
  float* prob;   // [n]
  float* score;  // [n] biased
  int* chosen;   // [n_chosen]
} Routing;
// What begins it, of weights only. bias may be null.
DEVICE Routing start_route(const float* bias, int n, int n_chosen, char* memory) {
  Routing r;
  r.best = (u64*)memory, r.prob = (float*)(r.best + CANDIDATES(n, n_chosen)), r.score = r.prob + n, r.chosen = (int*)(r.score + n);
  for (int i = THREAD; i < n; i += N_THREADS) r.score[i] = bias ? bias[i] : 0.0f;
  return r;
}
// Of token t: probs = sigmoid(logits), biased = probs + bias; experts by biased; weights: probs of the chosen, renormalised, then scaled.
// Outputs that nobody reads may be null. min_sum: lower bound of the weights' sum. Of the experts those from `first` on are here,
// `count` of them, and get the number of their place; others -1.
DEVICE void route(Routing r, const float* logits, float* probs, float* biased, int* experts, float* weights, float* weights_norm,
                  float* weights_scaled, long long t, int n, int n_chosen, int normalise, float min_sum, float scale, int first, int count) {
  for (int i = THREAD; i < n; i += N_THREADS) {
    float p = 1.0f / (1.0f + expf(-logits[t * n + i]));
    r.prob[i] = p, r.score[i] += p;
    if (probs) probs[t * n + i] = p;
    if (biased) biased[t * n + i] = r.score[i];
  }
  barrier();
  choose(r.score, r.best, n, n_chosen, r.chosen);
  float sum = 0;
  for (int k = 0; k < n_chosen; k++) sum += r.prob[r.chosen[k]];
  sum = !normalise ? 1.0f : sum < min_sum ? min_sum : sum;  // NaN stays NaN
  for (int k = THREAD; k < n_chosen; k += N_THREADS) {
    float p = r.prob[r.chosen[k]];
    int place = r.chosen[k] - first;
    experts[t * n_chosen + k] = place >= 0 && place < count ? place : -1;
    if (weights) weights[t * n_chosen + k] = p;
    if (weights_norm) weights_norm[t * n_chosen + k] = p / sum;
    weights_scaled[t * n_chosen + k] = p / sum * scale;
  }
}
