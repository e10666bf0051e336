// The only place where CUDA, HIP and host emulation differ. Compiled before every kernel family; LANES (threads of a warp)
// comes from the host, which asks the device. No fused multiply-adds are formed (-fmad=false, -ffp-contract=off): fmaf() is
// written where one is meant, so that every platform computes the same bits where the operations are the same.

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;  // also the bits of an f16 or bf16 number
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct __attribute__((aligned(16))) { int x, y, z, w; } I4;  // one 16-byte load
typedef struct __attribute__((aligned(8))) { int x, y; } I2;
typedef struct __attribute__((aligned(16))) { float x, y, z, w; } F4;
typedef struct __attribute__((aligned(8))) { float x, y; } F2;

#if defined(EMULATED)

#define DEVICE static inline
#define KERNEL extern "C" void
#define BOUNDS(threads, blocks)
#define AT_MOST(threads)
#define SHARED static __attribute__((section("emu_shared"), aligned(16)))
#define DYNAMIC_SHARED(name) char* name = emu::dynamic_shared
#define UNROLL
#define THREAD emu::thread
#define N_THREADS emu::n_threads
#define BLOCK_X ((int)emu::block[0])
#define BLOCK_Y ((int)emu::block[1])
#define BLOCK_Z ((int)emu::block[2])
#define GRID_X ((int)emu::grid[0])
#define barrier() emu::yield(emu::AT_BLOCK)
#define as_u32(x) bits_to_u32(x)
DEVICE u32 bits_to_u32(float x) { u32 y; memcpy(&y, &x, 4); return y; }
DEVICE float as_f32(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEVICE int lane_read(int x, int lane) { return (int)emu::exchange((u32)x, lane); }
DEVICE float f16_to_f32(u16 h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
DEVICE u16 f32_to_f16(float f) { _Float16 x = (_Float16)f; u16 h; memcpy(&h, &x, 2); return h; }
DEVICE int dot4(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(s8)(a >> 8 * i) * (int)(s8)(b >> 8 * i);
  return c;
}
DEVICE u64 mul_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
DEVICE void atomic_add(int* p, int v) { *p += v; }
DEVICE void atomic_add_u64(u64* p, u64 v) { *p += v; }
DEVICE int bit_count(u32 x) { return __builtin_popcount(x); }

#elif defined(__HIP__) || defined(__HIP_DEVICE_COMPILE__)

#define DEVICE static __device__ inline __attribute__((always_inline))
#define KERNEL extern "C" __global__ void
#define BOUNDS(threads, blocks) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define AT_MOST(threads) BOUNDS(threads, 1)  // clang reserves registers for 1024 threads otherwise
#define SHARED __shared__ __attribute__((aligned(16)))
#define DYNAMIC_SHARED(name) extern __shared__ __attribute__((aligned(16))) char name[]
#define UNROLL _Pragma("unroll")
#define THREAD ((int)__builtin_amdgcn_workitem_id_x())
#define N_THREADS ((int)__builtin_amdgcn_workgroup_size_x())
#define BLOCK_X ((int)__builtin_amdgcn_workgroup_id_x())
#define BLOCK_Y ((int)__builtin_amdgcn_workgroup_id_y())
#define BLOCK_Z ((int)__builtin_amdgcn_workgroup_id_z())
#define GRID_X ((int)(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()))
#define as_u32(x) __builtin_bit_cast(u32, (float)(x))
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE float as_f32(u32 x) { return __builtin_bit_cast(float, x); }
DEVICE int lane_read(int x, int lane) {  // ds_bpermute addresses the lanes of a wave in bytes
  return __builtin_amdgcn_ds_bpermute(lane << 2, x);
}
DEVICE float f16_to_f32(u16 h) { return (float)__builtin_bit_cast(_Float16, h); }
DEVICE u16 f32_to_f16(float f) { return __builtin_bit_cast(u16, (_Float16)f); }
DEVICE int dot4(int a, int b, int c) {
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx1030__)
  return __builtin_amdgcn_sdot4(a, b, c, false);
#elif defined(__gfx1100__)
  return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#else
  for (int i = 0; i < 4; i++) c += (int)(s8)(a >> 8 * i) * (int)(s8)(b >> 8 * i);
  return c;
#endif
}
DEVICE u64 mul_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
DEVICE void atomic_add(int* p, int v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE void atomic_add_u64(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE int bit_count(u32 x) { return __builtin_popcount(x); }

#else  // CUDA

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define AT_MOST(threads)
#define SHARED __shared__ __align__(16)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#define UNROLL _Pragma("unroll")
#define THREAD ((int)threadIdx.x)
#define N_THREADS ((int)blockDim.x)
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define BLOCK_Z ((int)blockIdx.z)
#define GRID_X ((int)gridDim.x)
#define barrier() __syncthreads()
#define as_u32(x) __float_as_uint(x)
DEVICE float as_f32(u32 x) { return __uint_as_float(x); }
DEVICE int lane_read(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float f16_to_f32(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 f32_to_f16(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
DEVICE u64 mul_high(u64 a, u64 b) { return __umul64hi(a, b); }
DEVICE void atomic_add(int* p, int v) { atomicAdd(p, v); }
DEVICE void atomic_add_u64(u64* p, u64 v) { atomicAdd(p, v); }
DEVICE int bit_count(u32 x) { return __popc(x); }

#endif

// dot4 of unsigned bytes a, multiples of 4; and c + the halves of a, 16-bit integers, times the lower, or the upper two bytes of b.
#if defined(__CUDA_ARCH__)
DEVICE int dot4_high(u32 a, int b, int c) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}
DEVICE int dot2_low(int a, int b, int c) { return __dp2a_lo(a, b, c); }
DEVICE int dot2_high(int a, int b, int c) { return __dp2a_hi(a, b, c); }
#else
DEVICE int dot4_high(u32 a, int b, int c) { return c + 4 * dot4((int)(a >> 2), b, 0); }
DEVICE int dot2_low(int a, int b, int c) { return c + (short)a * (s8)b + (a >> 16) * (s8)(b >> 8); }
DEVICE int dot2_high(int a, int b, int c) { return dot2_low(a, b >> 16, c); }
#endif

#define LANE (THREAD & (LANES - 1))
#define WARP (THREAD / LANES)
#define MAX_WARPS (1024 / LANES)

// --- sums over lanes and blocks ----------------------------------------------------------------------------------------------

DEVICE int imin(int a, int b) { return a < b ? a : b; }
DEVICE int imax(int a, int b) { return a > b ? a : b; }
DEVICE float lane_read_f32(float x, int lane) { return as_f32((u32)lane_read((int)as_u32(x), lane)); }

// Sum over groups of `width` lanes (a power of two); every lane gets it.
DEVICE float lane_sum(float x, int width) {
  for (int step = width / 2; step; step /= 2) x += lane_read_f32(x, LANE ^ step);
  return x;
}
DEVICE int lane_sum_int(int x, int width) {
  for (int step = width / 2; step; step /= 2) x += lane_read(x, LANE ^ step);
  return x;
}
DEVICE float lane_max(float x, int width) {
  for (int step = width / 2; step; step /= 2) x = fmaxf(x, lane_read_f32(x, LANE ^ step));
  return x;
}

// In how many lanes of the warp x is true; every lane gets it.
DEVICE int lanes_with(bool x) {
#if defined(EMULATED)
  return lane_sum_int(x, LANES);
#elif defined(__CUDA_ARCH__)
  return __popc(__ballot_sync(0xffffffffu, x));
#else
  return __builtin_popcountll(__builtin_amdgcn_uicmp(x, 0, 33));  // 33: not equal
#endif
}
DEVICE bool any_lane(bool x) { return lanes_with(x) > 0; }

// Sum over the block; every thread gets it. All threads call it.
DEVICE float block_sum(float x) {
  SHARED float parts[MAX_WARPS];
  x = lane_sum(x, LANES);
  barrier();  // the parts of an earlier call have been read
  if (LANE == 0) parts[WARP] = x;
  barrier();
  return lane_sum(LANE < N_THREADS / LANES ? parts[LANE] : 0.0f, LANES);
}
DEVICE float block_max(float x) {
  SHARED float parts[MAX_WARPS];
  x = lane_max(x, LANES);
  barrier();
  if (LANE == 0) parts[WARP] = x;
  barrier();
  return lane_max(parts[LANE < N_THREADS / LANES ? LANE : 0], LANES);
}

// Exclusive prefix sum of n over the block's threads; *total gets the sum. All threads call it.
DEVICE int block_scan(int n, int* total) {
  SHARED int parts[MAX_WARPS];
  int sum = n;  // inclusive over the warp
  for (int step = 1; step < LANES; step *= 2) {
    int left = lane_read(sum, LANE >= step ? LANE - step : LANE);
    if (LANE >= step) sum += left;
  }
  barrier();
  if (LANE == LANES - 1) parts[WARP] = sum;
  barrier();
  int warps = LANE < N_THREADS / LANES ? parts[LANE] : 0;  // inclusive over the warps, in every warp
  for (int step = 1; step < MAX_WARPS; step *= 2) {
    int left = lane_read(warps, LANE >= step ? LANE - step : LANE);
    if (LANE >= step) warps += left;
  }
  int before = lane_read(warps, WARP ? WARP - 1 : 0);
  *total = lane_read(warps, MAX_WARPS - 1);
  return (WARP ? before : 0) + sum - n;
}

// 16 bytes from global to shared memory without waiting, or zeros; stage_wait() and a barrier before they are read.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE void stage16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(inside ? 16 : 0) : "memory");
}
DEVICE void stage_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
DEVICE void stage16(void* to, const void* from, bool inside) {
  I4 zero = {0, 0, 0, 0};
  *(I4*)to = inside ? *(const I4*)from : zero;
}
DEVICE void stage_wait() {}
#endif

// --- kernels that start early ------------------------------------------------------------------------------------------------
// On Hopper and later a kernel's blocks may start while the kernel before it still runs, as soon as that one has its own inputs
// (npglm/gpu/device.py asks for it). The rule: every thread of every kernel calls wait_for_inputs() before it writes anything, and
// before it reads what the kernel before it may write; all earlier kernels are complete when it starts, unless the one before it has
// called let_next_start(). npglm/gpu/device.py: settled() tells what may be read early; weights always.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory"); }
// For a kernel that waits late (LETS_NEXT_START in npglm/gpu/device.py): the next one may start when the one before is not complete.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_inputs() {}
DEVICE void let_next_start() {}
#endif
// What is in an array until a kernel has written it, for the next one, which reads it without waiting for the whole of that kernel. The
// mark comes from a kernel before the one that writes.
#define NOT_YET -2

// --- memory that another GPU or the host writes or reads meanwhile -----------------------------------------------------------
// 16 bytes, of which each 8 arrive whole.
#if defined(__CUDA_ARCH__)
DEVICE I4 read16(const I4* from) {
  I4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
#else
DEVICE I4 read16(const I4* from) {
  u64 a = ((const volatile u64*)from)[0], b = ((const volatile u64*)from)[1];
  I4 v = {(int)(u32)a, (int)(a >> 32), (int)(u32)b, (int)(b >> 32)};
  return v;
}
#endif

// What this thread has read and written so far comes before all that it reads and writes from here on, also for the host.
#if defined(EMULATED)
DEVICE void fence() {}
#elif defined(__CUDA_ARCH__)
DEVICE void fence() { asm volatile("membar.sys;" ::: "memory"); }
#else
DEVICE void fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
#endif

// x as two f16 numbers, high + low / 2048: as exact as f32 unless x is beyond f16.
DEVICE void split_f16(float x, u16* high, u16* low) {
  *high = f32_to_f16(x);
  *low = f32_to_f16((x - f16_to_f32(*high)) * 2048.0f);
}

// Two integers below 1024, in the halves of a word, as f16 numbers.
DEVICE u32 f16_pair(u32 two) {
#if defined(__CUDA_ARCH__)
  u32 pair;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(two | 0x64006400u), "r"(0x64006400u));  // 1024 + x, less 1024
  return pair;
#else
  return (u32)f32_to_f16((float)(two & 0xffff)) | (u32)f32_to_f16((float)(two >> 16)) << 16;
#endif
}

// --- the matrix tile ---------------------------------------------------------------------------------------------------------
// acc[16][16] += a[16][depth] b[16][depth]^T by one warp; depth is 32 (int8) or 16 (f16). tile_a and tile_b read rows of 32 bytes,
// k contiguous, from shared memory into registers. A lane holds TILE_ACC elements of acc: element i is at row tile_row(i), column
// tile_col(i); TILE_PAIRS: elements 2 i and 2 i + 1 are neighbours in a row. It holds TILE_B_WORDS words of b, which a kernel may change (2-bit weights): word i has 4 int8 of column
// tile_b_column(i), in half tile_b_half(i) of the depth.

#define TILE 16
#define TILE_ACC (256 / LANES)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

#define TILE_PAIRS 1
#define TILE_B_WORDS 4
typedef struct { u32 r[4]; } TileA;
typedef struct { u32 r[4]; } TileB;  // r[0..1]: columns 0-7, r[2..3]: columns 8-15
DEVICE int tile_b_column(int i) { return (LANE >> 2) + (i >> 1) * 8; }
DEVICE int tile_b_half(int i) { return i & 1; }
DEVICE int tile_row(int i) { return (LANE >> 2) + ((i >> 1) & 1) * 8; }
DEVICE int tile_col(int i) { return (LANE & 3) * 2 + (i & 1) + (i >> 2) * 8; }

// 32 bytes a row, for int8 (32 deep) and f16 (16 deep) alike; addresses are multiples of 16 bytes.
DEVICE void ldmatrix(u32* r, const void* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE TileA tile_a(const void* a, int row_bytes) {
  TileA t;
  ldmatrix(t.r, (const char*)a + (LANE & 15) * row_bytes + (LANE >> 4) * 16);
  return t;
}
DEVICE TileB tile_b(const void* b, int row_bytes) {
  TileB t;
  ldmatrix(t.r, (const char*)b + ((LANE & 7) + (LANE >> 4) * 8) * row_bytes + ((LANE >> 3) & 1) * 16);
  return t;
}
DEVICE TileB tile_b_f16_transposed(const u16* b, int row_bytes) {  // b[k][column]: 16 rows of k, 16 columns
  TileB t;
  u32 address = (u32)__cvta_generic_to_shared((const char*)b + (LANE & 15) * row_bytes + (LANE >> 4) * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(t.r[0]), "=r"(t.r[1]), "=r"(t.r[2]), "=r"(t.r[3]) : "r"(address));
  return t;
}
DEVICE void tile_s8(int* acc, TileA a, TileB b) {
  UNROLL for (int half = 0; half < 2; half++) {
    int* c = acc + 4 * half;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * half]), "r"(b.r[2 * half + 1]));
  }
}
DEVICE void tile_f16(float* acc, TileA a, TileB b) {
  UNROLL for (int half = 0; half < 2; half++) {
    float* c = acc + 4 * half;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * half]), "r"(b.r[2 * half + 1]));
  }
}

#elif defined(__gfx908__) || defined(__gfx90a__)  // MFMA: element i is at row 4 * (lane / 16) + i, column lane % 16

typedef int V4i __attribute__((ext_vector_type(4)));
typedef float V4f __attribute__((ext_vector_type(4)));
typedef _Float16 V4h __attribute__((ext_vector_type(4)));
#define TILE_PAIRS 0
#define TILE_B_WORDS 2
typedef struct { int r[2]; } TileA;  // 8 of a row's 32 bytes: the depth may be taken in any order, as long as a and b agree
typedef TileA TileB;
DEVICE int tile_b_column(int i) { (void)i; return LANE & 15; }
DEVICE int tile_b_half(int i) { (void)i; return LANE >> 5; }
DEVICE int tile_row(int i) { return (LANE >> 4) * 4 + i; }
DEVICE int tile_col(int i) { (void)i; return LANE & 15; }
DEVICE TileA tile_a(const void* a, int row_bytes) {
  I2 v = *(const I2*)((const char*)a + (LANE & 15) * row_bytes + (LANE >> 4) * 8);
  TileA t = {{v.x, v.y}};
  return t;
}
DEVICE TileB tile_b(const void* b, int row_bytes) { return tile_a(b, row_bytes); }
DEVICE TileB tile_b_f16_transposed(const u16* b, int row_bytes) {
  u32 h[4];
  for (int i = 0; i < 4; i++) h[i] = *(const u16*)((const char*)b + ((LANE >> 4) * 4 + i) * row_bytes + (LANE & 15) * 2);
  TileB t = {{(int)(h[0] | h[1] << 16), (int)(h[2] | h[3] << 16)}};
  return t;
}
DEVICE void tile_s8(int* acc, TileA a, TileB b) {
  V4i c = {acc[0], acc[1], acc[2], acc[3]};
  c = __builtin_amdgcn_mfma_i32_16x16x16i8(a.r[0], b.r[0], c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_i32_16x16x16i8(a.r[1], b.r[1], c, 0, 0, 0);
  for (int i = 0; i < 4; i++) acc[i] = c[i];
}
DEVICE void tile_f16(float* acc, TileA a, TileB b) {
  V4f c = {acc[0], acc[1], acc[2], acc[3]};
  c = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(V4h, a), __builtin_bit_cast(V4h, b), c, 0, 0, 0);
  for (int i = 0; i < 4; i++) acc[i] = c[i];
}

#else  // no matrix unit (gfx906, RDNA, emulation): a lane keeps its row of a and its columns of b, and multiplies them alone

#define TILE_PAIRS 1
#define TILE_B_WORDS (8 * TILE_ACC)
typedef struct { int r[8]; } TileA;
typedef struct { int r[TILE_B_WORDS]; } TileB;
DEVICE int tile_row(int i) { (void)i; return LANE * TILE_ACC >> 4; }
DEVICE int tile_col(int i) { return (LANE * TILE_ACC + i) & 15; }
DEVICE int tile_b_column(int i) { return tile_col(i >> 3); }
DEVICE int tile_b_half(int i) { return i >> 2 & 1; }
DEVICE TileA tile_a(const void* a, int row_bytes) {
  TileA t;
  for (int k = 0; k < 8; k++) t.r[k] = ((const int*)((const char*)a + tile_row(0) * row_bytes))[k];
  return t;
}
DEVICE TileB tile_b(const void* b, int row_bytes) {
  TileB t;
  for (int i = 0; i < TILE_B_WORDS; i++) t.r[i] = ((const int*)((const char*)b + tile_b_column(i) * row_bytes))[i & 7];
  return t;
}
DEVICE TileB tile_b_f16_transposed(const u16* b, int row_bytes) {
  TileB t;
  for (int i = 0; i < TILE_B_WORDS; i++) {
    const char* k = (const char*)b + (i & 7) * 2 * row_bytes + tile_b_column(i) * 2;
    t.r[i] = (int)(*(const u16*)k | (u32) * (const u16*)(k + row_bytes) << 16);
  }
  return t;
}
DEVICE void tile_s8(int* acc, TileA a, TileB b) {
  for (int i = 0; i < TILE_B_WORDS; i++) acc[i >> 3] = dot4(a.r[i & 7], b.r[i], acc[i >> 3]);
}
DEVICE void tile_f16(float* acc, TileA a, TileB b) {
  for (int i = 0; i < TILE_ACC; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      u32 x = (u32)a.r[k >> 1] >> 16 * (k & 1), y = (u32)b.r[8 * i + (k >> 1)] >> 16 * (k & 1);
      sum = fmaf(f16_to_f32((u16)x), f16_to_f32((u16)y), sum);
    }
    acc[i] += sum;
  }
}

#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)  // JOIN(matvec_, TYPE): a kernel's name says its weight type
