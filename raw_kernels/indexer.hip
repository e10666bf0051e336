// The indexer's scores over f32 keys.
//
// score[t, s] = sum over heads of weights[t, i] * relu(q[t, i] . key[s]); -inf where s > pos[t]. One thread per key; DIM values
// of it stay in registers. Dynamic shared memory: heads * (DIM + 1) floats.
KERNEL BOUNDS(128, 2) indexer_score_f32(const float* q, const float* keys, const float* weights, const int* pos,
                                                 float* score, int heads, int width) {
  wait_for_inputs();
  DYNAMIC_SHARED(memory);
  float* qs = (float*)memory;  // [heads, DIM]
  float* ws = qs + heads * DIM;
  int t = BLOCK_Y, s = BLOCK_X * N_THREADS + THREAD, last = pos[t];
  float* out = score + (long long)t * width;
  if (BLOCK_X * N_THREADS > last) {  // the whole block
    if (s < width) out[s] = as_f32(0xff800000u);
    return;
  }
  for (int i = THREAD; i < heads * DIM; i += N_THREADS) qs[i] = q[(long long)t * heads * DIM + i];
  for (int i = THREAD; i < heads; i += N_THREADS) ws[i] = weights[(long long)t * heads + i];
  barrier();
  float key[DIM], sum = 0;
  const float* row = keys + (long long)imin(s, last) * DIM;
  UNROLL for (int j = 0; j < DIM; j++) key[j] = row[j];
  for (int i = 0; i < heads; i++) {
    float part[4] = {0, 0, 0, 0};
    UNROLL for (int j = 0; j < DIM; j++) part[j & 3] = fmaf(qs[i * DIM + j], key[j], part[j & 3]);
    float dot = (part[0] + part[1]) + (part[2] + part[3]);
    sum = fmaf(ws[i], dot <= 0.0f ? 0.0f : dot, sum);  // NaN stays NaN
  }
  if (s < width) out[s] = s <= last ? sum : as_f32(0xff800000u);
}
