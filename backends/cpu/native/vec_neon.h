// vec on NEON: four registers. See vec_portable.h for what each function means; included inside an ISA's namespace.

struct vec { float32x4_t q0, q1, q2, q3; };  // lanes 0-3, 4-7, 8-11, 12-15

// A GEMM tile that fits the 32 registers: 6 rows by 1 panel of accumulators (24), a weight (4), a broadcast.
constexpr int kTileRows = 6;
constexpr int kWideRows = 2;  // up to this many rows take two panels at once
constexpr int kQuadRows = 1;   // up to this many rows take four panels of codes at once
constexpr int kRunUnroll = 8;  // of a loop over eight codes

OCTAVO_INLINE vec v_set1(float x) {
    float32x4_t q = vdupq_n_f32(x);
    return {q, q, q, q};
}
OCTAVO_INLINE vec v_zero() { return v_set1(0.0f); }
OCTAVO_INLINE vec v_load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
OCTAVO_INLINE void v_store(float *p, vec a) {
    vst1q_f32(p, a.q0);
    vst1q_f32(p + 4, a.q1);
    vst1q_f32(p + 8, a.q2);
    vst1q_f32(p + 12, a.q3);
}

#define OCTAVO_UNARY(name, op) \
    OCTAVO_INLINE vec name(vec a) { return {op(a.q0), op(a.q1), op(a.q2), op(a.q3)}; }
#define OCTAVO_BINARY(name, op) \
    OCTAVO_INLINE vec name(vec a, vec b) { return {op(a.q0, b.q0), op(a.q1, b.q1), op(a.q2, b.q2), op(a.q3, b.q3)}; }
OCTAVO_BINARY(v_add, vaddq_f32)
OCTAVO_BINARY(v_sub, vsubq_f32)
OCTAVO_BINARY(v_mul, vmulq_f32)
OCTAVO_BINARY(v_div, vdivq_f32)
OCTAVO_INLINE float32x4_t quarter_max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
OCTAVO_INLINE float32x4_t quarter_min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
OCTAVO_BINARY(v_max, quarter_max)
OCTAVO_BINARY(v_min, quarter_min)
OCTAVO_UNARY(v_rint, vrndnq_f32)
OCTAVO_INLINE float32x4_t quarter_pow2(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
OCTAVO_UNARY(v_pow2, quarter_pow2)
#undef OCTAVO_UNARY
#undef OCTAVO_BINARY

OCTAVO_INLINE vec v_fma(vec a, vec b, vec c) {
    return {vfmaq_f32(c.q0, a.q0, b.q0), vfmaq_f32(c.q1, a.q1, b.q1), vfmaq_f32(c.q2, a.q2, b.q2), vfmaq_f32(c.q3, a.q3, b.q3)};
}
OCTAVO_INLINE vec v_fnma(vec a, vec b, vec c) {
    return {vfmsq_f32(c.q0, a.q0, b.q0), vfmsq_f32(c.q1, a.q1, b.q1), vfmsq_f32(c.q2, a.q2, b.q2), vfmsq_f32(c.q3, a.q3, b.q3)};
}

OCTAVO_INLINE float v_hsum(vec a) {
    float32x4_t q = vaddq_f32(vaddq_f32(a.q0, a.q2), vaddq_f32(a.q1, a.q3));
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
OCTAVO_INLINE float v_hmax(vec a) {
    float32x4_t q = quarter_max(quarter_max(a.q0, a.q2), quarter_max(a.q1, a.q3));
    float x = vgetq_lane_f32(q, 0) > vgetq_lane_f32(q, 2) ? vgetq_lane_f32(q, 0) : vgetq_lane_f32(q, 2);
    float y = vgetq_lane_f32(q, 1) > vgetq_lane_f32(q, 3) ? vgetq_lane_f32(q, 1) : vgetq_lane_f32(q, 3);
    return x > y ? x : y;
}

OCTAVO_INLINE float32x4_t quarter_widen_bf16(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
OCTAVO_INLINE uint16x4_t quarter_narrow_bf16(float32x4_t a) {
    uint32x4_t u = vreinterpretq_u32_f32(a);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
OCTAVO_INLINE vec v_load_bf16(const uint16_t *p) {
    return {quarter_widen_bf16(vld1_u16(p)), quarter_widen_bf16(vld1_u16(p + 4)), quarter_widen_bf16(vld1_u16(p + 8)),
            quarter_widen_bf16(vld1_u16(p + 12))};
}
OCTAVO_INLINE void v_store_bf16(uint16_t *p, vec a) {
    vst1_u16(p, quarter_narrow_bf16(a.q0));
    vst1_u16(p + 4, quarter_narrow_bf16(a.q1));
    vst1_u16(p + 8, quarter_narrow_bf16(a.q2));
    vst1_u16(p + 12, quarter_narrow_bf16(a.q3));
}

OCTAVO_INLINE float32x4_t quarter_widen_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
OCTAVO_INLINE void quarter_store_f16(uint16_t *p, float32x4_t a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
OCTAVO_INLINE vec v_load_f16(const uint16_t *p) {
    return {quarter_widen_f16(p), quarter_widen_f16(p + 4), quarter_widen_f16(p + 8), quarter_widen_f16(p + 12)};
}
OCTAVO_INLINE void v_store_f16(uint16_t *p, vec a) {
    quarter_store_f16(p, a.q0);
    quarter_store_f16(p + 4, a.q1);
    quarter_store_f16(p + 8, a.q2);
    quarter_store_f16(p + 12, a.q3);
}

OCTAVO_INLINE vec v_load_n(const float *p, int64_t n) {
    float lanes[16] = {0};
    memcpy(lanes, p, size_t(n) * sizeof(float));
    return v_load(lanes);
}
OCTAVO_INLINE void v_store_n(float *p, vec a, int64_t n) {
    float lanes[16];
    v_store(lanes, a);
    memcpy(p, lanes, size_t(n) * sizeof(float));
}

OCTAVO_INLINE vec v_join(vec a, vec b, int64_t n) {
    float lanes[16];
    v_store(lanes, b);
    v_store_n(lanes, a, n);
    return v_load(lanes);
}

OCTAVO_INLINE vec v_load_i8(const int8_t *p) {
    int8x16_t codes = vld1q_s8(p);
    int16x8_t lo = vmovl_s8(vget_low_s8(codes)), hi = vmovl_s8(vget_high_s8(codes));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))};
}

struct nibbles { uint32x4_t q0, q1, q2, q3; };
OCTAVO_INLINE uint32x4_t quarter_codes(const uint8_t *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
OCTAVO_INLINE nibbles n_load(const uint8_t *p) {
    return {quarter_codes(p), quarter_codes(p + 16), quarter_codes(p + 32), quarter_codes(p + 48)};
}
OCTAVO_INLINE uint32x4_t quarter_top(uint32x4_t n, int j) {  // the code in the four highest bits
    return vshlq_u32(n, vdupq_n_s32(28 - (8 * (j % 4) + 4 * (j / 4))));
}
OCTAVO_INLINE float32x4_t quarter_signed(uint32x4_t n, int j) {
    return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(quarter_top(n, j)), 28));
}
OCTAVO_INLINE float32x4_t quarter_unsigned(uint32x4_t n, int j) { return vcvtq_f32_u32(vshrq_n_u32(quarter_top(n, j), 28)); }
OCTAVO_INLINE vec v_nibble_signed(nibbles n, int j) {
    return {quarter_signed(n.q0, j), quarter_signed(n.q1, j), quarter_signed(n.q2, j), quarter_signed(n.q3, j)};
}
OCTAVO_INLINE vec v_nibble_unsigned(nibbles n, int j) {
    return {quarter_unsigned(n.q0, j), quarter_unsigned(n.q1, j), quarter_unsigned(n.q2, j), quarter_unsigned(n.q3, j)};
}

#define OCTAVO_TAILS_BY_COPY
