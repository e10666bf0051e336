// The FFN of few tokens (dots.hip): gate, up and SwiGLU in one pass, and the down products of a token's experts added up.
// An expert of -1 counts as zero. settled: experts may be read early: the kernel before this one has not written them, or
// does so in place of NOT_YET.

// Read early it must come from memory: a first-level cache may hold what was there before.
DEVICE int expert_at(const int* experts, int i) {
  int expert;
  do expert = ((const volatile int*)experts)[i];
  while (expert == NOT_YET);
  return expert;
}

// y[pair, row] = swiglu(gate, up). Where logits are given, the first block of threads of each token routes it meanwhile (router.hip).
KERNEL AT_MOST(BLOCK) JOIN(matvec_gate_up_swiglu_, TYPE)(const u8* gate, const u8* gate_scales, const u16* gate_d, const u8* up,
                                          const u8* up_scales, const u16* up_d, const s8* x, const void* x_d, const short* sums,
                                          const int* experts, float* y, int n_out, int x_div, int settled, const float* logits,
                                          const float* bias, int* routed, float* weights, int n_experts, int n_chosen, int normalise,
                                          float min_sum, float scale, int first, int count) {
  DYNAMIC_SHARED(memory);
  int pair = BLOCK_Z * x_div + BLOCK_Y, block = logits ? BLOCK_X - 1 : BLOCK_X;
  int row = imin(imax(block, 0) * BLOCK_ROWS + THREAD / GROUP * ROWS, n_out - ROWS);
  Matrix g = {gate, gate_scales, gate_d}, v = {up, up_scales, up_d};
  W ring[RING] = {};
  float acc[2 * ROWS];
  UNROLL for (int r = 0; r < 2 * ROWS; r++) acc[r] = 0;
  if (experts && !settled) wait_for_inputs();
  long long matrix = experts ? expert_at(experts, pair) : 0;
  g = FROM_ROW(g, matrix * n_out + row), v = FROM_ROW(v, matrix * n_out + row);
  Routing r = {};
  if (block < 0) r = start_route(bias, n_experts, n_chosen, memory);
  else if (matrix >= 0) start_dots(ring, g, v, 2);
  wait_for_inputs();
  if (block < 0) {
    route(r, logits, 0, 0, routed, 0, 0, weights, BLOCK_Z, n_experts, n_chosen, normalise, min_sum, scale, first, count);
    return;
  }
  if (matrix >= 0) add_dots(acc, ring, g, v, 2, x, x_d, sums, BLOCK_Z, BLOCK_Z + 1, 1, 1.0f);
  UNROLL for (int r = 0; r < ROWS; r++) {
    float gate_sum = group_sum(acc[r]), up_sum = group_sum(acc[ROWS + r]);
    if (THREAD % GROUP == r) acc[0] = gate_sum, acc[ROWS] = up_sum;
  }
  if (THREAD % GROUP < ROWS) y[(long long)pair * n_out + row + THREAD % GROUP] = acc[0] / (1.0f + expf(-acc[0])) * acc[ROWS];
}

// y[t, row] = sum over k of weights[t, k] * (matrix experts[t, k] . x[t * CHOSEN + k]), plus beside[t, row] if there is one. The
// GROUPS of a block share its ROWS rows and take the choices in turn; their sums are added in order. Where inboxes are given, y of
// one token is this rank's part of a sum, and goes there too (inbox.hip).
#define TURNS ((CHOSEN + GROUPS - 1) / GROUPS)
KERNEL AT_MOST(BLOCK) JOIN(matvec_down_combine_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                        const short* sums, const int* experts, const float* weights, const float* beside,
                                        float* y, int n_out, int settled, const u64* inboxes, const int* calls, int capacity,
                                        int rank, int world) {
  SHARED float part[BLOCK_ROWS];
  if (!settled) wait_for_inputs();
  int t = BLOCK_Y, row = imin(BLOCK_X * ROWS, n_out - ROWS), group = THREAD / GROUP;
  Matrix m = {w, scales, d};
  W ring[TURNS * RING_OF(ROWS * STEPS)] = {};
  float total[ROWS];
  Matrix at[TURNS];
  int matrix[TURNS];
  UNROLL for (int r = 0; r < ROWS; r++) total[r] = 0;
  UNROLL for (int j = 0; j < TURNS; j++) {
    int k = group + j * GROUPS;
    matrix[j] = CHOSEN % GROUPS == 0 || k < CHOSEN ? expert_at(experts, t * CHOSEN + k) : -1;
    at[j] = FROM_ROW(m, (long long)matrix[j] * n_out + row);
  }
  UNROLL for (int j = 0; j < TURNS; j++)
    if (matrix[j] >= 0) start_dots(ring + j * RING_OF(ROWS * STEPS), at[j], at[j], 1);
  wait_for_inputs();
  Ranks ranks = {};
  if (inboxes) ranks = ranks_of(inboxes, calls, capacity, rank, world);
  UNROLL for (int j = 0; j < TURNS; j++) {
    int pair = t * CHOSEN + group + j * GROUPS;
    if (matrix[j] >= 0)
      add_dots(total, ring + j * RING_OF(ROWS * STEPS), at[j], at[j], 1, x, x_d, sums, pair, pair + 1, 1, weights[pair]);
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    float sum = group_sum(total[r]);
    if (THREAD % GROUP == 0) part[group * ROWS + r] = sum;
  }
  barrier();
  if (THREAD < ROWS && row + THREAD < n_out) {
    float sum = 0;
    for (int g = 0; g < GROUPS; g++) sum += part[g * ROWS + THREAD];
    long long at = (long long)t * n_out + row + THREAD;
    if (beside) sum += beside[at];
    y[at] = sum;
    if (inboxes) give(ranks, row + THREAD, sum);
  }
}
