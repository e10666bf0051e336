// Integer dot products of quantised weights with 8-bit activation blocks, for few tokens: bound by the bytes of the weights.
// GROUP threads share ROWS rows, of which each reads 16 bytes at a time, a unit. The first RING units are on their way in registers
// before the kernel waits for its activations, and as many stay on their way. N_IN is a constant.
//
// Weights are stored apart (npglm/gpu/weights.py), so that every read is aligned:
//   q8_0  w int8 [rows, n_in], d f16 [rows, n_in/32]
//   q2_k  w uint8 [rows, n_in/4], scales uint8 [rows, n_in/16], d f16 [rows, n_in/256, 2] (d, dmin)
// Activations: x int8 [n, n_in] (q8_k: placed as blocks.hip says), x_d (q8_0: f16 per 32; q8_k: f32 per 256), sums int16 per 16 (q8_k).

#define GROUPS (BLOCK / GROUP)
#define BLOCK_ROWS (GROUPS * ROWS)

typedef struct { const u8 *w, *scales; const u16* d; } Matrix;
typedef struct { I4 q; u16 d; } W_q8_0;  // unit u of a row: 16 values
typedef struct { I4 q; I2 scales; u32 dm; } W_q2_k;  // 64 values
typedef struct { I4 q; float d; } X_q8_0;
typedef struct { I4 q[4]; int sums02, sums13; float d; } X_q2_k;  // sums of 16 values, in halves of a word

DEVICE int dot16(I4 a, I4 b) { return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0)))); }

// A thread's units of a row are FIRST_UNIT, and every GROUP-th after it (GROUP is a multiple of 4).
#define UNITS_q8_0 (N_IN / 16)  // of a row
#define UNITS_q2_k (N_IN / 64)
#define UNITS JOIN(UNITS_, TYPE)
#define STEPS ((UNITS + GROUP - 1) / GROUP)  // units of a row that one thread takes; the last step may be partial
#define FIRST_UNIT (UNITS < GROUP ? imin(THREAD % GROUP, UNITS - 1) : THREAD % GROUP)
#define IS_UNIT(step) (UNITS % GROUP == 0 || THREAD % GROUP + (step) * GROUP < UNITS)

// The matrix from this thread's first unit of a row on; and its unit number `step` of the r-th row from there.
DEVICE Matrix from_row_q8_0(Matrix m, long long row) {
  m.w += row * N_IN + 16 * FIRST_UNIT, m.d += row * (N_IN / 32) + (FIRST_UNIT >> 1);
  return m;
}
DEVICE W_q8_0 fetch_q8_0(Matrix m, int r, int step) {
  W_q8_0 unit = {*(const I4*)(m.w + r * N_IN + step * GROUP * 16), m.d[r * (N_IN / 32) + step * GROUP / 2]};
  return unit;
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
DEVICE Matrix from_row_q2_k(Matrix m, long long row) {
  m.w += row * (N_IN / 4) + 16 * FIRST_UNIT;
  m.scales += row * (N_IN / 16) + 8 * (FIRST_UNIT >> 1);
  m.d += 2 * (row * (N_IN / 256) + (FIRST_UNIT >> 2));
  return m;
}
DEVICE W_q2_k fetch_q2_k(Matrix m, int r, int step) {
  W_q2_k unit = {*(const I4*)(m.w + r * (N_IN / 4) + step * GROUP * 16), *(const I2*)(m.scales + r * (N_IN / 16) + step * GROUP * 4),
                 *(const u32*)(m.d + 2 * (r * (N_IN / 256) + step * GROUP / 4))};
  return unit;
}
DEVICE X_q2_k load_q2_k(const s8* x, const void* x_d, const short* sums, int u, int step) {
  X_q2_k r;
  r.d = ((const float*)x_d + (u >> 2))[step * GROUP / 4];
  x += (u >> 2) * 256 + (u & 3) * 16 + step * GROUP * 64;
  int odd = ((u >> 2) + step * GROUP / 4) & 1;
  UNROLL for (int j = 0; j < 4; j++) r.q[j] = *(const I4*)(x + (j ^ odd) * 64);  // as blocks.hip places them
  I4 s = *(const I4*)(sums + (u >> 1) * 8 + step * GROUP * 4);  // word j holds the sums of quarters p and p + 1
  int shift = 16 * (u & 1);
  r.sums02 = (int)(((u32)s.x >> shift & 0xffff) | (u32)s.z >> shift << 16);
  r.sums13 = (int)(((u32)s.y >> shift & 0xffff) | (u32)s.w >> shift << 16);
  return r;
}
DEVICE I4 mask4(I4 a, int mask) {
  I4 r = {a.x & mask, a.y & mask, a.z & mask, a.w & mask};
  return r;
}
DEVICE int dot16_high(I4 a, I4 b) {
  return dot4_high((u32)a.x, b.x, dot4_high((u32)a.y, b.y, dot4_high((u32)a.z, b.z, dot4_high((u32)a.w, b.w, 0))));
}
DEVICE float dot_q2_k(W_q2_k w, X_q2_k x, int half) {
  u32 s01 = (u32)w.scales.x >> 8 * half, s23 = (u32)w.scales.y >> 8 * half;  // scale j, and its minimum above it, in byte 0 or 2
  // The two bits are left in place, which saves shifts: their dot products are 1, 4, 16 and 64 times too large.
  int sum = (int)(s23 >> 16 & 15) * dot16_high(mask4(w.q, (int)0xc0c0c0c0), x.q[3]) >> 2;
  sum = (sum + (int)(s23 & 15) * dot16(mask4(w.q, 0x30303030), x.q[2])) >> 2;
  sum = (sum + (int)(s01 >> 16 & 15) * dot16(mask4(w.q, 0x0c0c0c0c), x.q[1])) >> 2;
  sum += (int)(s01 & 15) * dot16(mask4(w.q, 0x03030303), x.q[0]);
  int minima = (int)((s01 >> 4 & 0x000f000f) | (s23 << 4 & 0x0f000f00));  // 0, 2, 1, 3
  int mins = dot2_low(x.sums02, minima, dot2_high(x.sums13, minima, 0));
  return x.d * (f16_to_f32((u16)w.dm) * (float)sum - f16_to_f32((u16)(w.dm >> 16)) * (float)mins);
}

#define W JOIN(W_, TYPE)
#define X JOIN(X_, TYPE)
#define FROM_ROW JOIN(from_row_, TYPE)
#define FETCH JOIN(fetch_, TYPE)
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

// Units in the order of their use: of each step, those of ROWS rows of each of `parts` matrices, 1 or 2, which FROM_ROW has given
// (no row past n_out - 1 is read: the first one is at most n_out - ROWS). Unit i of this thread:
DEVICE W unit_at(Matrix a, Matrix b, int parts, int i) {
  int step = i / (parts * ROWS);
  return FETCH(i / ROWS % parts ? b : a, i % ROWS, IS_UNIT(step) ? step : 0);
}
#define RING_OF(units) ((units) < RING ? (units) : RING)
DEVICE void start_dots(W* ring, Matrix a, Matrix b, int parts) {
  UNROLL for (int i = 0; i < RING_OF(parts * ROWS * STEPS); i++) ring[i] = unit_at(a, b, parts, i);
}
// acc[(part * ROWS + r) * TOKENS + t] += factor * (row r of the part's matrix . row min(pair + t, n_pairs - 1) / x_div of x), this
// thread's share of it. REFILL units at a time are fetched into the ring's places that are free.
DEVICE void add_dots(float* acc, W* ring, Matrix a, Matrix b, int parts, const s8* x, const void* x_d, const short* sums, int pair,
                     int n_pairs, int x_div, float factor) {
  X in[TOKENS] = {};
  int units = parts * ROWS * STEPS, size = RING_OF(units);
  UNROLL for (int i = 0; i < units; i++) {
    int step = i / (parts * ROWS);
    W now = ring[i % size];
    if (REFILL == 1 && i + size < units) ring[i % size] = unit_at(a, b, parts, i + size);
    UNROLL for (int t = 0; t < TOKENS; t++) {
      if (i % (parts * ROWS) == 0) in[t] = LOAD(X_ROW(imin(pair + t, n_pairs - 1) / x_div), FIRST_UNIT, IS_UNIT(step) ? step : 0);
      if (IS_UNIT(step)) acc[i % (parts * ROWS) * TOKENS + t] += factor * DOT(now, in[t], THREAD & 1);
    }
    if (REFILL > 1 && i % REFILL == REFILL - 1)
      UNROLL for (int k = i + 1 - REFILL; k <= i; k++)
        if (k + size < units) ring[k % size] = unit_at(a, b, parts, k + size);
  }
}
// The whole of it for one matrix whose first units start_dots has fetched: in all threads of the group.
DEVICE void finish_dots(float* acc, W* ring, Matrix m, const s8* x, const void* x_d, const short* sums, int pair, int n_pairs, int x_div) {
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = 0;
  add_dots(acc, ring, m, m, 1, x, x_d, sums, pair, n_pairs, x_div, 1.0f);
  UNROLL for (int i = 0; i < ROWS * TOKENS; i++) acc[i] = group_sum(acc[i]);
}
