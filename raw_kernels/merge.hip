// The splits of one token and head of attention (attention_f16.hip) put together. Parts without rows have sum 0 and are zero.
#define MINUS_INFINITY as_f32(0xff800000u)
#define MAX_SPLITS 256
#define AHEAD 32  // parts on their way at once

// The parts from s0 on of one value, splits at `stride`.
DEVICE void load_parts(const float* part, long long stride, int s0, int splits, float* value) {
  UNROLL for (int i = 0; i < AHEAD; i++) value[i] = part[imin(s0 + i, splits - 1) * stride];
}
// weight [MAX_SPLITS], shared: what each split counts, there after the next barrier. Returns their sum. part_ml of the first split;
// all threads of the block call it.
DEVICE float split_weights(const float* part_ml, int heads, int splits, float* weight) {
  float most[MAX_SPLITS / LANES], sums[MAX_SPLITS / LANES];  // each warp has those of all splits
  UNROLL for (int i = 0; i < MAX_SPLITS / LANES; i++) {
    int s = LANE + i * LANES;
    F2 ml = {MINUS_INFINITY, 0};
    if (s < splits) ml = ((const F2*)part_ml)[s * heads];
    most[i] = ml.x, sums[i] = ml.y;
  }
  float largest = MINUS_INFINITY, sum = 0;
  UNROLL for (int i = 0; i < MAX_SPLITS / LANES; i++)
    if (sums[i] != 0.0f) largest = fmaxf(largest, most[i]);
  largest = lane_max(largest, LANES);
  UNROLL for (int i = 0; i < MAX_SPLITS / LANES; i++) {
    float w = sums[i] != 0.0f ? expf(most[i] - largest) : 0.0f;
    if (WARP == 0) weight[LANE + i * LANES] = w;
    sum += w * sums[i];
  }
  return lane_sum(sum, LANES);
}
// value: the first parts, loaded.
DEVICE float merged(float* value, const float* part, long long stride, int splits, const float* weight) {
  float total = 0;
  for (int s0 = 0;;) {
    UNROLL for (int i = 0; i < AHEAD; i++)
      if (s0 + i < splits) total = fmaf(value[i], weight[s0 + i], total);
    s0 += AHEAD;
    if (s0 >= splits) return total;
    load_parts(part, stride, s0, splits, value);
  }
}
