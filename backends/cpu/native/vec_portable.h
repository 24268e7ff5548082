// vec: sixteen fp32 lanes, the one vector all kernels are written in; this is its meaning in plain C++.
//
//     avx512: one zmm        avx2: two ymm        neon: four q        portable: four groups of four
//
// Because the width is 16 everywhere, horizontal sums fold in one order everywhere, and every operation below is exactly
// rounded, a kernel written in vec gives the same bits on every instruction set. Loads and stores need no alignment.
// Included inside an ISA's namespace, after kernels.h.

struct vec { float lane[16]; };

// A GEMM tile: rows of accumulators, and up to how many rows take two panels at once.
constexpr int kTileRows = 2;
constexpr int kWideRows = 1;
constexpr int kQuadRows = 0;   // up to this many rows take four panels of codes at once
constexpr int kRunUnroll = 1;  // of a loop over eight codes

#define OCTAVO_LANES(expression) \
    vec r; \
    for (int i = 0; i < 16; ++i) r.lane[i] = (expression); \
    return r

OCTAVO_INLINE vec v_set1(float x) { OCTAVO_LANES(x); }
OCTAVO_INLINE vec v_zero() { OCTAVO_LANES(0.0f); }
OCTAVO_INLINE vec v_load(const float *p) { OCTAVO_LANES(p[i]); }
OCTAVO_INLINE void v_store(float *p, vec a) { memcpy(p, a.lane, sizeof a.lane); }

// The first n lanes, 0 <= n <= 16; the others load as zero, and are not stored.
OCTAVO_INLINE vec v_load_n(const float *p, int64_t n) { OCTAVO_LANES(i < n ? p[i] : 0.0f); }
OCTAVO_INLINE void v_store_n(float *p, vec a, int64_t n) { memcpy(p, a.lane, size_t(n) * sizeof(float)); }

// The first n lanes of a, 0 <= n <= 16, and the rest of b.
OCTAVO_INLINE vec v_join(vec a, vec b, int64_t n) { OCTAVO_LANES(i < n ? a.lane[i] : b.lane[i]); }

OCTAVO_INLINE vec v_add(vec a, vec b) { OCTAVO_LANES(a.lane[i] + b.lane[i]); }
OCTAVO_INLINE vec v_sub(vec a, vec b) { OCTAVO_LANES(a.lane[i] - b.lane[i]); }
OCTAVO_INLINE vec v_mul(vec a, vec b) { OCTAVO_LANES(a.lane[i] * b.lane[i]); }
OCTAVO_INLINE vec v_div(vec a, vec b) { OCTAVO_LANES(a.lane[i] / b.lane[i]); }
OCTAVO_INLINE vec v_fma(vec a, vec b, vec c) { OCTAVO_LANES(fmaf(a.lane[i], b.lane[i], c.lane[i])); }    // a b + c
OCTAVO_INLINE vec v_fnma(vec a, vec b, vec c) { OCTAVO_LANES(fmaf(-a.lane[i], b.lane[i], c.lane[i])); }  // c - a b

// The larger, the smaller; b where either is NaN.
OCTAVO_INLINE vec v_max(vec a, vec b) { OCTAVO_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
OCTAVO_INLINE vec v_min(vec a, vec b) { OCTAVO_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }

// To the nearest whole number, ties to even; |a| < 2^22 (or NaN, which stays).
OCTAVO_INLINE vec v_rint(vec a) { OCTAVO_LANES((a.lane[i] + 12582912.0f) - 12582912.0f); }

// 2^n for whole n in [-126, 127]; NaN gives some finite value.
OCTAVO_INLINE float lane_pow2(float n) {
    uint32_t bits = uint32_t((n == n ? int32_t(n) : 0) + 127) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
OCTAVO_INLINE vec v_pow2(vec n) { OCTAVO_LANES(lane_pow2(n.lane[i])); }

// Sum and maximum over the lanes, by folding halves: i with i + 8, then i + 4, i + 2, i + 1.
OCTAVO_INLINE float v_hsum(vec a) {
    for (int half = 8; half; half /= 2) {
        for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] + a.lane[i + half];
    }
    return a.lane[0];
}
OCTAVO_INLINE float v_hmax(vec a) {
    for (int half = 8; half; half /= 2) {
        for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    }
    return a.lane[0];
}

OCTAVO_INLINE float widen_bf16(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
OCTAVO_INLINE uint16_t narrow_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if (x != x) return uint16_t((u | 0x400000u) >> 16);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
// bf16 and fp16 to fp32 exactly, and back to nearest even; NaN stays NaN.
OCTAVO_INLINE vec v_load_bf16(const uint16_t *p) { OCTAVO_LANES(widen_bf16(p[i])); }
OCTAVO_INLINE void v_store_bf16(uint16_t *p, vec a) {
    for (int i = 0; i < 16; ++i) p[i] = narrow_bf16(a.lane[i]);
}

OCTAVO_INLINE float widen_f16(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu, bits;
    if (magnitude < 0x400u) {  // zero and subnormals: magnitude * 2^-24
        float x = float(magnitude) * 5.9604644775390625e-8f;
        memcpy(&bits, &x, sizeof bits);
    } else if (magnitude < 0x7c00u) {
        bits = (magnitude << 13) + (112u << 23);
    } else {
        bits = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
    }
    bits |= sign;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
OCTAVO_INLINE uint16_t narrow_f16(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude >= 0x38800000u) return uint16_t(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
    float scaled;
    memcpy(&scaled, &magnitude, sizeof scaled);
    return uint16_t(sign | uint32_t(scaled * 16777216.0f + 8388608.0f - 8388608.0f));  // subnormal: a multiple of 2^-24
}
OCTAVO_INLINE vec v_load_f16(const uint16_t *p) { OCTAVO_LANES(widen_f16(p[i])); }
OCTAVO_INLINE void v_store_f16(uint16_t *p, vec a) {
    for (int i = 0; i < 16; ++i) p[i] = narrow_f16(a.lane[i]);
}

// Sixteen codes of 8 bits, and sixteen times eight of 4 bits (codes.h), as numbers. j in 0..7 is a constant where speed matters.
OCTAVO_INLINE vec v_load_i8(const int8_t *p) { OCTAVO_LANES(float(p[i])); }

struct nibbles { uint32_t lane[16]; };
OCTAVO_INLINE nibbles n_load(const uint8_t *p) {
    nibbles n;
    memcpy(n.lane, p, sizeof n.lane);
    return n;
}
OCTAVO_INLINE int nibble_shift(int j) { return 8 * (j % 4) + 4 * (j / 4); }
OCTAVO_INLINE vec v_nibble_signed(nibbles n, int j) { OCTAVO_LANES(float(int(((n.lane[i] >> nibble_shift(j)) & 15) ^ 8) - 8)); }
OCTAVO_INLINE vec v_nibble_unsigned(nibbles n, int j) { OCTAVO_LANES(float(int((n.lane[i] >> nibble_shift(j)) & 15))); }

#undef OCTAVO_LANES
#define OCTAVO_TAILS_BY_COPY
