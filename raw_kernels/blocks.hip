// ggml's 8-bit activation blocks, made by lanes of a warp.

// rint(x * factor) of 4 values, at most 127, as bytes.
DEVICE u32 pack4(const float* x, float factor) {
  u32 packed = 0;
  UNROLL for (int j = 0; j < 4; j++) packed |= (u32)(imin((int)rintf(x[j] * factor), 127) & 255) << 8 * j;
  return packed;
}

// |x| as an integer: ordered as |x| is, NaN above infinity above all else, so that the scale of a block that holds one shows it.
DEVICE int magnitude(float x) { return (int)(as_u32(x) & 0x7fffffffu); }
DEVICE float largest_of(int magnitude, int width) {  // over groups of `width` lanes
  for (int step = width / 2; step; step /= 2) magnitude = imax(magnitude, lane_read(magnitude, LANE ^ step));
  return as_f32((u32)magnitude);
}

// 32 neighbouring lanes hold 32 values. Scale amax / 127 in f16, values rint(x * (127 / amax)). All lanes of the warp call it.
DEVICE int q8_0_of(float x, u16* d) {
  float largest = largest_of(magnitude(x), 32);
  *d = f32_to_f16(largest / 127.0f);
  return (int)rintf(x * (largest != 0.0f ? 127.0f / largest : 0.0f));
}

// The blocks Q8_0 of n values, a multiple of 32, which are in shared memory. All threads of the block call it.
DEVICE void store_made(const float* made, int n, s8* q, u16* d) {
  for (int i0 = 0; i0 < n; i0 += N_THREADS) {
    int i = i0 + THREAD;
    u16 scale;
    int value = q8_0_of(i < n ? made[i] : 0.0f, &scale);
    if (i < n) q[i] = (s8)value;
    if (i < n && i % 32 == 0) d[i / 32] = scale;
  }
}

// A warp holds 256 values, lane l the PER_LANE ones from l * PER_LANE on. All lanes call these.
#define PER_LANE (256 / LANES)

// 8 blocks Q8_0: q (256), d (8).
DEVICE void store_q8_0(const float* x, s8* q, u16* d) {
  int most = 0;
  UNROLL for (int j = 0; j < PER_LANE; j++) most = imax(most, magnitude(x[j]));
  float largest = largest_of(most, 32 / PER_LANE);
  float inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
  UNROLL for (int j = 0; j < PER_LANE; j += 4) *(u32*)(q + LANE * PER_LANE + j) = pack4(x + j, inverse);
  if (LANE % (32 / PER_LANE) == 0) d[LANE / (32 / PER_LANE)] = f32_to_f16(largest / 127.0f);
}

// One block Q8_K. Returns the factor, -127 / (the first value of largest magnitude); *d: its inverse.
DEVICE float q8_k_factor(const float* x, float* d) {
  float largest = x[0];
  UNROLL for (int j = 1; j < PER_LANE; j++)
    if (magnitude(x[j]) > magnitude(largest)) largest = x[j];
  for (int step = 1; step < LANES; step *= 2) {  // groups grow from neighbours: of equals the lower lane's wins
    float other = lane_read_f32(largest, LANE ^ step);
    if (magnitude(other) > magnitude(largest) || (magnitude(other) == magnitude(largest) && (LANE & step))) largest = other;
  }
  float factor = largest != 0.0f ? -127.0f / largest : 0.0f;
  *d = largest != 0.0f ? 1.0f / factor : 0.0f;
  return factor;
}
// Where value i of a block, i % 4 == 0, lies in q: the 16 values that bits 2j of a quarter p of 2-bit weights go with (dots.hip) are
// number 4 * j + p, so that neighbouring threads read neighbouring ones; of odd blocks j and j ^ 1 change places, so that the threads of
// two blocks read other banks.
DEVICE int q8_k_place(int i, int block) { return (((i >> 5) ^ (block & 1)) & 3) * 64 + (i >> 7) * 32 + (i & 31); }
// Block number b of a row: of its q (256, as said), d, and sums of each 16 values (16).
DEVICE void store_q8_k(const float* x, int b, s8* q, float* d, short* sums) {
  float scale, factor = q8_k_factor(x, &scale);
  int sum = 0;
  UNROLL for (int j = 0; j < PER_LANE; j += 4) {
    u32 packed = pack4(x + j, factor);
    *(u32*)(q + b * 256 + q8_k_place(LANE * PER_LANE + j, b)) = packed;
    sum = dot4((int)packed, 0x01010101, sum);
  }
  sum = lane_sum_int(sum, 16 / PER_LANE);
  if (LANE % (16 / PER_LANE) == 0) sums[b * 16 + LANE / (16 / PER_LANE)] = (short)sum;
  if (LANE == 0) d[b] = scale;
}
