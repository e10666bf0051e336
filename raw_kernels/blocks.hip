// ggml's 8-bit activation blocks, made by lanes of a warp.

// rint(x * factor) of 4 values, at most 127, as bytes.
DEVICE u32 pack4(const float* x, float factor) {
  u32 packed = 0;
  UNROLL for (int j = 0; j < 4; j++) packed |= (u32)(imin((int)rintf(x[j] * factor), 127) & 255) << 8 * j;
  return packed;
}

// 32 neighbouring lanes hold 32 values. Scale amax / 127 in f16, values rint(x * (127 / amax)). All lanes of the warp call it.
DEVICE int q8_0_of(float x, u16* d) {
  float largest = lane_max(fabsf(x), 32);
  *d = f32_to_f16(largest / 127.0f);
  return (int)rintf(x * (largest != 0.0f ? 127.0f / largest : 0.0f));
}

// A warp holds 256 values, lane l the PER_LANE ones from l * PER_LANE on. All lanes call these.
#define PER_LANE (256 / LANES)

// 8 blocks Q8_0: q (256), d (8).
DEVICE void store_q8_0(const float* x, s8* q, u16* d) {
  float largest = 0;
  UNROLL for (int j = 0; j < PER_LANE; j++) largest = fmaxf(largest, fabsf(x[j]));
  largest = lane_max(largest, 32 / PER_LANE);
  float inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
  UNROLL for (int j = 0; j < PER_LANE; j += 4) *(u32*)(q + LANE * PER_LANE + j) = pack4(x + j, inverse);
  if (LANE % (32 / PER_LANE) == 0) d[LANE / (32 / PER_LANE)] = f32_to_f16(largest / 127.0f);
}

// One block Q8_K. The factor is -127 / (the first value of largest magnitude).
DEVICE float q8_k_factor(const float* x) {
  float largest = x[0];
  UNROLL for (int j = 1; j < PER_LANE; j++)
    if (fabsf(x[j]) > fabsf(largest)) largest = x[j];
  for (int step = 1; step < LANES; step *= 2) {  // groups grow from neighbours: of equals the lower lane's wins
    float other = lane_read_f32(largest, LANE ^ step);
    if (fabsf(other) > fabsf(largest) || (fabsf(other) == fabsf(largest) && (LANE & step))) largest = other;
  }
  return largest != 0.0f ? -127.0f / largest : 0.0f;
}
// q (256), d, sums of each 16 values (16).
DEVICE void store_q8_k(const float* x, s8* q, float* d, short* sums) {
  float factor = q8_k_factor(x);
  int sum = 0;
  UNROLL for (int j = 0; j < PER_LANE; j += 4) {
    u32 packed = pack4(x + j, factor);
    *(u32*)(q + LANE * PER_LANE + j) = packed;
    sum = dot4((int)packed, 0x01010101, sum);
  }
  sum = lane_sum_int(sum, 16 / PER_LANE);
  if (LANE % (16 / PER_LANE) == 0) sums[LANE / (16 / PER_LANE)] = (short)sum;
  if (LANE == 0) *d = factor != 0.0f ? 1.0f / factor : 0.0f;
}
