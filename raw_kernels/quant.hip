// One decoder per GGUF type: value i of a block, bit for bit what gguf.quants computes. Blocks lie at even addresses.
// grid: the type's table of gguf.quants as int8 (IQ types only). After the -D set of a variant: DECODE, BLOCK_VALUES, BLOCK_BYTES.

DEVICE float f16_at(const u8* p) { return f16_to_f32(*(const u16*)p); }
DEVICE u32 u32_at(const u8* p) { return (u32) * (const u16*)p | (u32) * (const u16*)(p + 2) << 16; }
DEVICE int nibble(const u8* p, int i) { return p[i >> 1] >> 4 * (i & 1) & 15; }
DEVICE int bit(const u8* p, int i) { return p[i >> 3] >> (i & 7) & 1; }

DEVICE float decode_f32(const u8* b, int i, const s8* grid) { (void)i, (void)grid; return as_f32(u32_at(b)); }
DEVICE float decode_f16(const u8* b, int i, const s8* grid) { (void)i, (void)grid; return f16_at(b); }
DEVICE float decode_bf16(const u8* b, int i, const s8* grid) { (void)i, (void)grid; return as_f32((u32) * (const u16*)b << 16); }

// 32 values: the low nibbles are the first 16.
DEVICE float decode_q4_0(const u8* b, int i, const s8* grid) {
  (void)grid;
  return f16_at(b) * (float)((b[2 + (i & 15)] >> 4 * (i >> 4) & 15) - 8);
}
DEVICE float decode_q4_1(const u8* b, int i, const s8* grid) {
  (void)grid;
  return f16_at(b) * (float)(b[4 + (i & 15)] >> 4 * (i >> 4) & 15) + f16_at(b + 2);
}
DEVICE float decode_q5_0(const u8* b, int i, const s8* grid) {
  (void)grid;
  int q = (b[6 + (i & 15)] >> 4 * (i >> 4) & 15) | bit(b + 2, i) << 4;
  return f16_at(b) * (float)(q - 16);
}
DEVICE float decode_q5_1(const u8* b, int i, const s8* grid) {
  (void)grid;
  int q = (b[8 + (i & 15)] >> 4 * (i >> 4) & 15) | bit(b + 4, i) << 4;
  return f16_at(b) * (float)q + f16_at(b + 2);
}
DEVICE float decode_q8_0(const u8* b, int i, const s8* grid) {
  (void)grid;
  return (float)(s8)b[2 + i] * f16_at(b);
}

// 256 values. Two bits: byte 32 * (i / 128) + i % 32, shifted by 2 * (i / 32 % 4).
DEVICE int two_bits(const u8* q, int i) { return q[(i >> 7) * 32 + (i & 31)] >> 2 * (i >> 5 & 3) & 3; }

DEVICE float decode_q2_k(const u8* b, int i, const s8* grid) {
  (void)grid;
  int scale = b[i >> 4];
  return f16_at(b + 80) * (float)(scale & 15) * (float)two_bits(b + 16, i) - f16_at(b + 82) * (float)(scale >> 4);
}
DEVICE float decode_q3_k(const u8* b, int i, const s8* grid) {
  (void)grid;
  int sub = i >> 4;
  const u8* scales = b + 96;
  int scale = (scales[sub & 7] >> 4 * (sub >> 3) & 15) | (scales[8 + (sub & 3)] >> 2 * (sub >> 2) & 3) << 4;
  int q = two_bits(b + 32, i) - (b[i & 31] >> (i >> 5) & 1 ? 0 : 4);
  return f16_at(b + 108) * (float)(scale - 32) * (float)q;
}

// Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes.
DEVICE int k_scale(const u8* s, int sub) { return sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 2 & 0x30); }
DEVICE int k_min(const u8* s, int sub) { return sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | (s[sub] >> 2 & 0x30); }

DEVICE float decode_q4_k(const u8* b, int i, const s8* grid) {
  (void)grid;
  int sub = i >> 5, q = b[16 + (i >> 6) * 32 + (i & 31)] >> 4 * (sub & 1) & 15;
  return f16_at(b) * (float)k_scale(b + 4, sub) * (float)q - f16_at(b + 2) * (float)k_min(b + 4, sub);
}
DEVICE float decode_q5_k(const u8* b, int i, const s8* grid) {
  (void)grid;
  int sub = i >> 5, q = (b[48 + (i >> 6) * 32 + (i & 31)] >> 4 * (sub & 1) & 15) | (b[16 + (i & 31)] >> sub & 1) << 4;
  return f16_at(b) * (float)k_scale(b + 4, sub) * (float)q - f16_at(b + 2) * (float)k_min(b + 4, sub);
}
DEVICE float decode_q6_k(const u8* b, int i, const s8* grid) {
  (void)grid;
  int low = b[(i >> 7) * 64 + (i & 63)] >> 4 * (i >> 6 & 1) & 15;
  int q = (low | two_bits(b + 128, i) << 4) - 32;
  return f16_at(b + 208) * (float)(s8)b[192 + (i >> 4)] * (float)q;
}

// Signs: 7 bits name 8 signs of even parity.
DEVICE float seven_bit_sign(u32 code, int k) {
  code &= 127;
  code |= (u32)(bit_count(code) & 1) << 7;
  return code >> k & 1 ? -1.0f : 1.0f;
}
DEVICE float decode_iq2_xxs(const u8* b, int i, const s8* grid) {
  const u8* group = b + 2 + 8 * (i >> 5);
  int l = i >> 3 & 3;
  u32 aux = u32_at(group + 4);
  float d = f16_at(b) * (0.5f + (float)(aux >> 28)) * 0.25f;
  return d * (float)grid[group[l] * 8 + (i & 7)] * seven_bit_sign(aux >> 7 * l, i & 7);
}
DEVICE float decode_iq2_xs(const u8* b, int i, const s8* grid) {
  u32 q = *(const u16*)(b + 2 + 2 * (i >> 3));
  float d = f16_at(b) * (0.5f + (float)nibble(b + 66, i >> 4)) * 0.25f;
  return d * (float)grid[(q & 511) * 8 + (i & 7)] * seven_bit_sign(q >> 9, i & 7);
}
DEVICE float decode_iq2_s(const u8* b, int i, const s8* grid) {
  int q = b[2 + (i >> 3)] | (b[66 + (i >> 5)] >> 2 * (i >> 3 & 3) & 3) << 8;
  float d = f16_at(b) * (0.5f + (float)nibble(b + 74, i >> 4)) * 0.25f;
  return d * (float)grid[q * 8 + (i & 7)] * (bit(b + 34, i) ? -1.0f : 1.0f);
}
DEVICE float decode_iq3_xxs(const u8* b, int i, const s8* grid) {
  u32 aux = u32_at(b + 66 + 4 * (i >> 5));
  float d = f16_at(b) * (0.5f + (float)(aux >> 28)) * 0.5f;
  return d * (float)grid[b[2 + (i >> 2)] * 4 + (i & 3)] * seven_bit_sign(aux >> 7 * (i >> 3 & 3), i & 7);
}
DEVICE float decode_iq3_s(const u8* b, int i, const s8* grid) {
  int q = b[2 + (i >> 2)] | bit(b + 66, i >> 2) << 8;
  float d = f16_at(b) * (float)(1 + 2 * nibble(b + 106, i >> 5));
  return d * (float)grid[q * 4 + (i & 3)] * (bit(b + 74, i) ? -1.0f : 1.0f);
}
DEVICE float decode_iq4_nl(const u8* b, int i, const s8* grid) {
  return f16_at(b) * (float)grid[b[2 + (i & 15)] >> 4 * (i >> 4) & 15];
}
DEVICE float decode_iq4_xs(const u8* b, int i, const s8* grid) {
  int sub = i >> 5, high = *(const u16*)(b + 2) >> 2 * sub & 3;
  float d = f16_at(b) * (float)((nibble(b + 4, sub) | high << 4) - 32);
  return d * (float)grid[b[8 + sub * 16 + (i & 15)] >> 4 * (i >> 4 & 1) & 15];
}
