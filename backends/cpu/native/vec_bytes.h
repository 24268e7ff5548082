// KV of one byte to fp32 and back: int8, and fp8 e4m3fn (Micikevicius et al. 2022; no infinities, 0x7f is NaN).
// Included after vec_math.h. Reading is exact. Writing rounds to nearest even and saturates; int8 has 0 for NaN, and its
// codes are symmetric, -127 to 127.
//
// An e4m3 code, moved by 7 bits, is a half with the exponent 8 too low, subnormals included: one conversion and a factor.

constexpr float kE4m3Factor = 256.0f;

OCTAVO_INLINE float widen_e4m3(uint8_t code) {
    if ((code & 0x7f) == 0x7f) return NAN;
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent ? ldexpf(float(8 + mantissa), exponent - 10) : float(mantissa) * 0.001953125f;
    return code & 0x80 ? -magnitude : magnitude;
}

OCTAVO_INLINE uint8_t narrow_e4m3(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7eu);  // 448 and beyond
    if (magnitude >= 0x3c800000u) return uint8_t(sign | ((magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20));
    float positive;
    memcpy(&positive, &magnitude, sizeof positive);
    return uint8_t(sign | uint32_t(positive * 512.0f + 8388608.0f - 8388608.0f));  // subnormal: a multiple of 2^-9
}

#if defined(OCTAVO_AVX512)
OCTAVO_INLINE vec v_load_e4m3(const uint8_t *p) {
    __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
    return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(kE4m3Factor))};
}
#elif defined(OCTAVO_AVX2)
OCTAVO_INLINE vec v_load_e4m3(const uint8_t *p) {
    __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
    __m256 factor = _mm256_set1_ps(kE4m3Factor);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor)};
}
#else
OCTAVO_INLINE vec v_load_e4m3(const uint8_t *p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = widen_e4m3(p[i]);
    return v_load(lanes);
}
#endif

// The first n codes, 0 <= n <= 16; the others load as zero, and are not stored.
OCTAVO_INLINE vec v_load_i8_n(const int8_t *p, int64_t n) {
    int8_t codes[16] = {0};
    memcpy(codes, p, size_t(n));
    return v_load_i8(codes);
}
OCTAVO_INLINE vec v_load_e4m3_n(const uint8_t *p, int64_t n) {
    uint8_t codes[16] = {0};
    memcpy(codes, p, size_t(n));
    return v_load_e4m3(codes);
}
OCTAVO_INLINE void v_store_i8_n(int8_t *p, vec a, int64_t n) {
    float lanes[16];
    v_store(lanes, v_rint(v_min(v_set1(127.0f), v_max(v_set1(-127.0f), a))));
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i] == lanes[i] ? int8_t(lanes[i]) : int8_t(0);
}
OCTAVO_INLINE void v_store_e4m3_n(uint8_t *p, vec a, int64_t n) {
    float lanes[16];
    v_store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = narrow_e4m3(lanes[i]);
}
