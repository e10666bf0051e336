// RMSNorm of rows of n = 256 * k values together with the 8-bit blocks of what comes out, which products will ask for.
// One block per row; a warp takes CHUNKS times 256 values and keeps them in registers.

KERNEL rms_norm_blocks_f32(const float* x, const float* weight, float* y, s8* q, u16* d, s8* q_k, float* d_k, short* sums, int n,
                           float eps) {
  float value[CHUNKS * PER_LANE], sum = 0;
  long long row = (long long)BLOCK_X * n;
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    int b = WARP + c * (N_THREADS / LANES), at = b * 256 + LANE * PER_LANE;
    UNROLL for (int j = 0; j < PER_LANE; j += 4) {
      F4 four = {0, 0, 0, 0};
      if (b < n / 256) four = *(const F4*)(x + row + at + j);
      float* to = value + c * PER_LANE + j;
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
    UNROLL for (int j = 0; j < PER_LANE; j++) sum = fmaf(value[c * PER_LANE + j], value[c * PER_LANE + j], sum);
  }
  float root = sqrtf(block_sum(sum) / (float)n + eps);
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    int b = WARP + c * (N_THREADS / LANES), at = b * 256 + LANE * PER_LANE;
    if (b < n / 256) {
      float* mine = value + c * PER_LANE;
      UNROLL for (int j = 0; j < PER_LANE; j += 4) {
        F4 w = *(const F4*)(weight + at + j);
        mine[j] = mine[j] / root * w.x, mine[j + 1] = mine[j + 1] / root * w.y;
        mine[j + 2] = mine[j + 2] / root * w.z, mine[j + 3] = mine[j + 3] / root * w.w;
        F4 four = {mine[j], mine[j + 1], mine[j + 2], mine[j + 3]};
        *(F4*)(y + row + at + j) = four;
      }
      store_q8_0(mine, q + row + b * 256, d + row / 32 + b * 8);
      store_q8_k(mine, q_k + row + b * 256, d_k + row / 256 + b, sums + row / 16 + b * 16);
    }
  }
}
