// Numbers as keys that sort like them: higher is larger, 0 is NaN; -0 and 0 are one.
DEVICE u32 sort_key(float x) {
  u32 u = as_u32(x + 0.0f);
  return x != x ? 0 : u ^ ((u32)((int)u >> 31) | 0x80000000u);
}
// A score and an index as one number: higher score first, then lower index.
DEVICE u64 ranked(float x, int i) { return (u64)sort_key(x) << 32 | (u32)~i; }
DEVICE u64 lane_max_u64(u64 x) {
  for (int step = LANES / 2; step; step /= 2) {
    u64 other = (u64)(u32)lane_read((int)(x >> 32), LANE ^ step) << 32 | (u32)lane_read((int)x, LANE ^ step);
    if (other > x) x = other;
  }
  return x;
}
