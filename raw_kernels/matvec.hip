// Products of few tokens with quantised weights, by integer dot products over 8-bit activation blocks. Bound by the bytes of
// the weights: GROUP threads share a row and read 16 bytes each, ROWS rows at a time, with the activations in registers. N_IN is
// a constant, so that the loads of several steps are in flight together.
//
// Weights are stored apart (npglm/gpu/weights.py), so that every read is aligned:
//   q8_0  w int8 [rows, n_in], d f16 [rows, n_in/32]
//   q2_k  w uint8 [rows, n_in/4], scales uint8 [rows, n_in/16], d f16 [rows, n_in/256, 2] (d, dmin)
// Activations: x int8 [n, n_in], x_d (q8_0: f16 per 32; q8_k: f32 per 256), sums int16 per 16 (q8_k).
// A pair is one row of activations with one matrix: pair p takes matrix experts[p], or p % n_matrices where experts is null,
// and row p / x_div of x.

#define BLOCK 128
#define GROUPS (BLOCK / GROUP)

typedef struct { I4 q; float d; } X_q8_0;
typedef struct { I4 q[4]; I4 sums; float d; } X_q2_k;

DEVICE int dot16(I4 a, I4 b) { return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0)))); }

// 16 bytes of weights: UNIT values, unit u of the row.
#define UNIT_q8_0 16
#define UNIT_q2_k 64
#define UNIT JOIN(UNIT_, TYPE)

DEVICE X_q8_0 load_q8_0(const s8* x, const void* x_d, const short* sums, int u) {
  (void)sums;
  X_q8_0 r;
  r.q = ((const I4*)x)[u];
  r.d = f16_to_f32(((const u16*)x_d)[u >> 1]);
  return r;
}
DEVICE float dot_q8_0(const u8* w, const u8* scales, const u16* d, long long row, int u, X_q8_0 x) {
  (void)scales;
  I4 q = ((const I4*)(w + row * N_IN))[u];
  return (float)dot16(q, x.q) * (f16_to_f32(d[row * (N_IN / 32) + (u >> 1)]) * x.d);
}

// Unit u is quarter p of its block: values 128 * (p / 2) + 32 * j + 16 * (p % 2) + (0..15) in bits 2j of its bytes.
DEVICE X_q2_k load_q2_k(const s8* x, const void* x_d, const short* sums, int u) {
  X_q2_k r;
  int half = u & 1, first = (u >> 1) * 128;
  for (int j = 0; j < 4; j++) r.q[j] = *(const I4*)(x + first + 32 * j + 16 * half);
  r.sums = *(const I4*)(sums + first / 16);  // word j holds the sums of both halves
  r.d = ((const float*)x_d)[u >> 2];
  return r;
}
DEVICE I4 mask4(I4 a, int shift, int mask) {
  I4 r = {(int)((u32)a.x >> shift) & mask, (int)((u32)a.y >> shift) & mask, (int)((u32)a.z >> shift) & mask,
          (int)((u32)a.w >> shift) & mask};
  return r;
}
DEVICE float dot_q2_k(const u8* w, const u8* scales, const u16* d, long long row, int u, X_q2_k x) {
  int half = u & 1;
  I4 q = ((const I4*)(w + row * (N_IN / 4)))[u];
  I2 s = ((const I2*)(scales + row * (N_IN / 16)))[u >> 1];
  u32 dm = ((const u32*)d)[row * (N_IN / 256) + (u >> 2)];
  u32 s01 = (u32)s.x >> 8 * half, s23 = (u32)s.y >> 8 * half;  // scale j in byte 0 or 2
  // The two bits are left in place where that saves a shift: their dot products are 4, 16 and 16 times too large.
  int sum = (int)(s01 & 15) * dot16(mask4(q, 0, 0x03030303), x.q[0]);
  sum += (int)(s01 >> 16 & 15) * dot16(mask4(q, 0, 0x0c0c0c0c), x.q[1]) >> 2;
  sum += ((int)(s23 & 15) * dot16(mask4(q, 0, 0x30303030), x.q[2]) +
          (int)(s23 >> 16 & 15) * dot16(mask4(q, 2, 0x30303030), x.q[3])) >> 4;
  int shift = 16 - 16 * half;  // the half's 16-bit sum, with its sign
  int mins = (int)(s01 >> 4 & 15) * ((int)((u32)x.sums.x << shift) >> 16) + (int)(s01 >> 20 & 15) * ((int)((u32)x.sums.y << shift) >> 16) +
             (int)(s23 >> 4 & 15) * ((int)((u32)x.sums.z << shift) >> 16) + (int)(s23 >> 20 & 15) * ((int)((u32)x.sums.w << shift) >> 16);
  return x.d * (f16_to_f32((u16)dm) * (float)sum - f16_to_f32((u16)(dm >> 16)) * (float)mins);
}

// Units of this thread; the last step is partial where they are no multiple of GROUP.
#define STEPS ((N_IN / UNIT + GROUP - 1) / GROUP)
#if STEPS <= 4
#define UNROLL_STEPS _Pragma("unroll")
#else
#define UNROLL_STEPS _Pragma("unroll 2")
#endif
#define FOR_UNITS \
  UNROLL_STEPS for (int step = 0, u = THREAD % GROUP; step < STEPS; step++, u += GROUP) \
    if (N_IN / UNIT % GROUP == 0 || u < N_IN / UNIT)
#define X JOIN(X_, TYPE)
#define LOAD JOIN(load_, TYPE)
#define DOT JOIN(dot_, TYPE)
// The three pointers of row r of the activations.
#define ROW_q8_0(r) x + (long long)(r) * N_IN, (const u16*)x_d + (long long)(r) * (N_IN / 32), sums
#define ROW_q2_k(r) x + (long long)(r) * N_IN, (const float*)x_d + (long long)(r) * (N_IN / 256), sums + (long long)(r) * (N_IN / 16)
#define X_ROW JOIN(ROW_, TYPE)

// Sum over the GROUP threads that share a row; all threads of the block call it.
DEVICE float group_sum(float x) {
  if (GROUP <= LANES) return lane_sum(x, GROUP);
  return block_sum(x);  // GROUP == BLOCK
}

// y[pair, row], y rows at y_stride elements. TOKENS pairs at once share a matrix (plain products only).
KERNEL AT_MOST(BLOCK) JOIN(matvec_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d, const short* sums,
                           const int* experts, float* y, int n_pairs, int n_out, int n_matrices, int x_div, long long y_stride) {
  int pair = BLOCK_Y * TOKENS;
  long long matrix = experts ? experts[pair] : pair % n_matrices;
  int row = (BLOCK_X * GROUPS + THREAD / GROUP) * ROWS;
  float acc[ROWS * TOKENS];
  for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = 0;
  FOR_UNITS {
    UNROLL for (int t = 0; t < TOKENS; t++) {
      X a = LOAD(X_ROW(imin(pair + t, n_pairs - 1) / x_div), u);
      UNROLL for (int r = 0; r < ROWS; r++)
        acc[r * TOKENS + t] += DOT(w, scales, d, matrix * n_out + imin(row + r, n_out - 1), u, a);
    }
  }
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) {
    float sum = group_sum(acc[i]);
    int r = row + i / TOKENS, p = pair + i % TOKENS;
    if (THREAD % GROUP == 0 && r < n_out && p < n_pairs) y[p * y_stride + r] = sum;
  }
}

// y[pair, row] = swiglu(gate, up): both matrices in one pass.
KERNEL AT_MOST(BLOCK) JOIN(matvec_gate_up_swiglu_, TYPE)(const u8* gate, const u8* gate_scales, const u16* gate_d, const u8* up,
                                          const u8* up_scales, const u16* up_d, const s8* x, const void* x_d, const short* sums,
                                          const int* experts, float* y, int n_out, int x_div) {
  int pair = BLOCK_Y;
  long long matrix = experts ? experts[pair] : 0;
  int row = (BLOCK_X * GROUPS + THREAD / GROUP) * ROWS;
  float g[ROWS], v[ROWS];
  for (int r = 0; r < ROWS; r++) g[r] = v[r] = 0;
  FOR_UNITS {
    X a = LOAD(X_ROW(pair / x_div), u);
    UNROLL for (int r = 0; r < ROWS; r++) {
      long long at = matrix * n_out + imin(row + r, n_out - 1);
      g[r] += DOT(gate, gate_scales, gate_d, at, u, a);
      v[r] += DOT(up, up_scales, up_d, at, u, a);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    float gate_sum = group_sum(g[r]), up_sum = group_sum(v[r]);
    if (THREAD % GROUP == 0 && row + r < n_out)
      y[(long long)pair * n_out + row + r] = gate_sum / (1.0f + expf(-gate_sum)) * up_sum;
  }
}

// y[t, row] = sum over k of weights[t, k] * (matrix experts[t, k] . x[t * CHOSEN + k]). The GROUPS of a block share its ROWS rows
// and take the choices in turn; their sums are added in order.
KERNEL AT_MOST(BLOCK) JOIN(matvec_down_combine_, TYPE)(const u8* w, const u8* scales, const u16* d, const s8* x, const void* x_d,
                                        const short* sums, const int* experts, const float* weights, float* y, int n_out) {
  SHARED float part[GROUPS * ROWS];
  int t = BLOCK_Y, row = BLOCK_X * ROWS, group = THREAD / GROUP;
  float total[ROWS];
  for (int r = 0; r < ROWS; r++) total[r] = 0;
  UNROLL for (int k0 = 0; k0 < CHOSEN; k0 += GROUPS) {
    int k = k0 + group, pair = t * CHOSEN + k;
    if (CHOSEN % GROUPS == 0 || k < CHOSEN) {
      float weight = weights[pair];
      long long matrix = experts[pair];
      FOR_UNITS {
        X a = LOAD(X_ROW(pair), u);
        UNROLL for (int r = 0; r < ROWS; r++)
          total[r] += weight * DOT(w, scales, d, matrix * n_out + imin(row + r, n_out - 1), u, a);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    float sum = group_sum(total[r]);
    if (THREAD % GROUP == 0) part[group * ROWS + r] = sum;
  }
  barrier();
  if (THREAD < ROWS && row + THREAD < n_out) {
    float sum = 0;
    for (int g = 0; g < GROUPS; g++) sum += part[g * ROWS + THREAD];
    y[(long long)t * n_out + row + THREAD] = sum;
  }
}
