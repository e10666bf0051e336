// Integer dot products of quantised weights with 8-bit activation blocks, for few tokens: bound by the bytes of the weights.
// GROUP threads share ROWS rows, of which each reads 16 bytes at a time, a unit. The first RING units are on their way in registers
// before the kernel waits for its activations, and as many stay on their way. N_IN is a constant.
//
// Weights are stored apart (npglm/gpu/weights.py), so that every read is aligned:
//   q8_0  w int8 [rows, n_in], d f16 [rows, n_in/32]
//   q2_k  w uint8 [rows, n_in/4], scales uint8 [rows, n_in/16], d f16 [rows, n_in/256, 2] (d, dmin)
// Activations: x int8 [n, n_in], x_d (q8_0: f16 per 32; q8_k: f32 per 256), sums int16 per 16 (q8_k).

#define GROUPS (BLOCK / GROUP)
#define BLOCK_ROWS (GROUPS * ROWS)

typedef struct { const u8 *w, *scales; const u16* d; } Matrix;
typedef struct { I4 q; u16 d; } W_q8_0;  // unit u of a row: 16 values
typedef struct { I4 q; I2 scales; u32 dm; } W_q2_k;  // 64 values
typedef struct { I4 q; float d; } X_q8_0;
typedef struct { I4 q[4]; I4 sums; float d; } X_q2_k;

DEVICE int dot16(I4 a, I4 b) { return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0)))); }

// A thread's units are u, u + GROUP, u + 2 * GROUP, ... of a row, GROUP a multiple of 4.
DEVICE W_q8_0 fetch_q8_0(Matrix m, long long row, int u, int step) {
  W_q8_0 r = {((const I4*)(m.w + row * N_IN) + u)[step * GROUP], (m.d + row * (N_IN / 32) + (u >> 1))[step * GROUP / 2]};
  return r;
}
DEVICE X_q8_0 load_q8_0(const s8* x, const void* x_d, const short* sums, int u, int step) {
  (void)sums;
  X_q8_0 r = {((const I4*)x + u)[step * GROUP], f16_to_f32(((const u16*)x_d + (u >> 1))[step * GROUP / 2])};
  return r;
}
DEVICE float dot_q8_0(W_q8_0 w, X_q8_0 x, int half) {
  (void)half;
  return (float)dot16(w.q, x.q) * (f16_to_f32(w.d) * x.d);
}

// Unit u is quarter p of its block: values 128 * (p / 2) + 32 * j + 16 * (p % 2) + (0..15) in bits 2j of its bytes.
DEVICE W_q2_k fetch_q2_k(Matrix m, long long row, int u, int step) {
  W_q2_k r = {((const I4*)(m.w + row * (N_IN / 4)) + u)[step * GROUP],
              ((const I2*)(m.scales + row * (N_IN / 16)) + (u >> 1))[step * GROUP / 2],
              ((const u32*)m.d + row * (N_IN / 256) + (u >> 2))[step * GROUP / 4]};
  return r;
}
DEVICE X_q2_k load_q2_k(const s8* x, const void* x_d, const short* sums, int u, int step) {
  X_q2_k r;
  x += (u >> 1) * 128 + (u & 1) * 16, sums += (u >> 1) * 8;
  UNROLL for (int j = 0; j < 4; j++) r.q[j] = *(const I4*)(x + step * GROUP * 64 + 32 * j);
  r.sums = *(const I4*)(sums + step * GROUP * 4);  // word j holds the sums of both halves
  r.d = ((const float*)x_d + (u >> 2))[step * GROUP / 4];
  return r;
}
DEVICE I4 mask4(I4 a, int shift, int mask) {
  I4 r = {(int)((u32)a.x >> shift) & mask, (int)((u32)a.y >> shift) & mask, (int)((u32)a.z >> shift) & mask,
          (int)((u32)a.w >> shift) & mask};
  return r;
}
DEVICE float dot_q2_k(W_q2_k w, X_q2_k x, int half) {
  u32 s01 = (u32)w.scales.x >> 8 * half, s23 = (u32)w.scales.y >> 8 * half;  // scale j in byte 0 or 2
  // The two bits are left in place where that saves a shift: their dot products are 4, 16 and 16 times too large.
  int sum = (int)(s01 & 15) * dot16(mask4(w.q, 0, 0x03030303), x.q[0]);
  sum += (int)(s01 >> 16 & 15) * dot16(mask4(w.q, 0, 0x0c0c0c0c), x.q[1]) >> 2;
  sum += ((int)(s23 & 15) * dot16(mask4(w.q, 0, 0x30303030), x.q[2]) +
          (int)(s23 >> 16 & 15) * dot16(mask4(w.q, 2, 0x30303030), x.q[3])) >> 4;
  int shift = 16 - 16 * half;  // the half's 16-bit sum, with its sign
  int mins = (int)(s01 >> 4 & 15) * ((int)((u32)x.sums.x << shift) >> 16) + (int)(s01 >> 20 & 15) * ((int)((u32)x.sums.y << shift) >> 16) +
             (int)(s23 >> 4 & 15) * ((int)((u32)x.sums.z << shift) >> 16) + (int)(s23 >> 20 & 15) * ((int)((u32)x.sums.w << shift) >> 16);
  return x.d * (f16_to_f32((u16)w.dm) * (float)sum - f16_to_f32((u16)(w.dm >> 16)) * (float)mins);
}

#define W JOIN(W_, TYPE)
#define X JOIN(X_, TYPE)
#define FETCH JOIN(fetch_, TYPE)
#define LOAD JOIN(load_, TYPE)
#define DOT JOIN(dot_, TYPE)
#define UNITS_q8_0 (N_IN / 16)  // of a row
#define UNITS_q2_k (N_IN / 64)
#define UNITS JOIN(UNITS_, TYPE)
#define STEPS ((UNITS + GROUP - 1) / GROUP)  // units of a row that one thread takes; the last step may be partial
#define FIRST_UNIT (UNITS < GROUP ? imin(THREAD % GROUP, UNITS - 1) : THREAD % GROUP)
#define IS_UNIT(step) (UNITS % GROUP == 0 || THREAD % GROUP + (step) * GROUP < UNITS)
// The three pointers of row r of the activations.
#define ROW_q8_0(r) x + (long long)(r) * N_IN, (const u16*)x_d + (long long)(r) * (N_IN / 32), sums
#define ROW_q2_k(r) x + (long long)(r) * N_IN, (const float*)x_d + (long long)(r) * (N_IN / 256), sums + (long long)(r) * (N_IN / 16)
#define X_ROW JOIN(ROW_, TYPE)

// Sum over the GROUP threads that share a row; all threads of the block call it.
DEVICE float group_sum(float x) {
  if (GROUP <= LANES) return lane_sum(x, GROUP);
  return block_sum(x);  // GROUP == BLOCK
}

// Units in the order of their use: of each step, those of rows row..row + ROWS - 1 (none past n_out - 1 is read) of each of `parts`
// matrices, 1 or 2. Unit i of this thread:
DEVICE W unit_at(Matrix a, Matrix b, int parts, long long matrix, int row, int n_out, int i) {
  int step = i / (parts * ROWS);
  return FETCH(i / ROWS % parts ? b : a, matrix * n_out + imin(row + i % ROWS, n_out - 1), FIRST_UNIT, IS_UNIT(step) ? step : 0);
}
#define RING_OF(units) ((units) < RING ? (units) : RING)
DEVICE void start_dots(W* ring, Matrix a, Matrix b, int parts, long long matrix, int row, int n_out) {
  UNROLL for (int i = 0; i < RING_OF(parts * ROWS * STEPS); i++) ring[i] = unit_at(a, b, parts, matrix, row, n_out, i);
}
// acc[(part * ROWS + r) * TOKENS + t] += factor * (row r of the part's matrix . row min(pair + t, n_pairs - 1) / x_div of x), this
// thread's share of it.
DEVICE void add_dots(float* acc, W* ring, Matrix a, Matrix b, int parts, long long matrix, int row, int n_out, const s8* x,
                     const void* x_d, const short* sums, int pair, int n_pairs, int x_div, float factor) {
  X in[TOKENS] = {};
  int units = parts * ROWS * STEPS, size = RING_OF(units);
  UNROLL for (int i = 0; i < units; i++) {
    int step = i / (parts * ROWS);
    W now = ring[i % size];
    if (i + size < units) ring[i % size] = unit_at(a, b, parts, matrix, row, n_out, i + size);
    UNROLL for (int t = 0; t < TOKENS; t++) {
      if (i % (parts * ROWS) == 0) in[t] = LOAD(X_ROW(imin(pair + t, n_pairs - 1) / x_div), FIRST_UNIT, IS_UNIT(step) ? step : 0);
      if (IS_UNIT(step)) acc[i % (parts * ROWS) * TOKENS + t] += factor * DOT(now, in[t], THREAD & 1);
    }
  }
}
// The whole of it for one matrix whose first units start_dots has fetched: in all threads of the group.
DEVICE void finish_dots(float* acc, W* ring, Matrix m, long long matrix, int row, int n_out, const s8* x, const void* x_d,
                        const short* sums, int pair, int n_pairs, int x_div) {
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = 0;
  add_dots(acc, ring, m, m, 1, matrix, row, n_out, x, x_d, sums, pair, n_pairs, x_div, 1.0f);
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = group_sum(acc[i]);
}
