// vec on AVX2 + FMA + F16C: two registers. See vec_portable.h for what each function means; included inside an ISA's namespace.

struct vec { __m256 lo, hi; };  // lanes 0-7, 8-15

// A GEMM tile that fits the 16 registers: 6 rows by 1 panel of accumulators (12), a weight (2), a broadcast.
constexpr int kTileRows = 6;
constexpr int kWideRows = 2;  // up to this many rows take two panels at once
constexpr int kQuadRows = 0;   // up to this many rows take four panels of codes at once
constexpr int kRunUnroll = 8;  // of a loop over eight codes

OCTAVO_INLINE vec v_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE vec v_set1(float x) {
    __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
OCTAVO_INLINE vec v_load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void v_store(float *p, vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

// All ones in the lanes of one half below n, which may be negative or above 8.
OCTAVO_INLINE __m256i half_mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
OCTAVO_INLINE vec v_load_n(const float *p, int64_t n) {
    return {_mm256_maskload_ps(p, half_mask(n)), _mm256_maskload_ps(p + 8, half_mask(n - 8))};
}
OCTAVO_INLINE void v_store_n(float *p, vec a, int64_t n) {
    _mm256_maskstore_ps(p, half_mask(n), a.lo);
    _mm256_maskstore_ps(p + 8, half_mask(n - 8), a.hi);
}

OCTAVO_INLINE __m256 half_join(__m256 a, __m256 b, int64_t n) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(half_mask(n)));
}
OCTAVO_INLINE vec v_join(vec a, vec b, int64_t n) { return {half_join(a.lo, b.lo, n), half_join(a.hi, b.hi, n - 8)}; }

OCTAVO_INLINE vec v_add(vec a, vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_sub(vec a, vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_mul(vec a, vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_div(vec a, vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_fma(vec a, vec b, vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
OCTAVO_INLINE vec v_fnma(vec a, vec b, vec c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
OCTAVO_INLINE vec v_max(vec a, vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_min(vec a, vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
OCTAVO_INLINE vec v_rint(vec a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OCTAVO_INLINE __m256 half_pow2(__m256 n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
OCTAVO_INLINE vec v_pow2(vec n) { return {half_pow2(n.lo), half_pow2(n.hi)}; }

OCTAVO_INLINE float v_hsum(vec a) {
    __m256 h = _mm256_add_ps(a.lo, a.hi);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float v_hmax(vec a) {
    __m256 h = _mm256_max_ps(a.lo, a.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

OCTAVO_INLINE __m256 half_widen_bf16(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
OCTAVO_INLINE __m256i half_round_bf16(__m256 a) {  // the bf16 in the low half of each 32-bit lane
    __m256i u = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
OCTAVO_INLINE vec v_load_bf16(const uint16_t *p) {
    return {half_widen_bf16(_mm_loadu_si128((const __m128i *)p)), half_widen_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
OCTAVO_INLINE void v_store_bf16(uint16_t *p, vec a) {
    __m256i both = _mm256_packus_epi32(half_round_bf16(a.lo), half_round_bf16(a.hi));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}

OCTAVO_INLINE vec v_load_f16(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
OCTAVO_INLINE void v_store_f16(uint16_t *p, vec a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#define OCTAVO_TAILS_BY_COPY

OCTAVO_INLINE __m256 half_load_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
OCTAVO_INLINE vec v_load_i8(const int8_t *p) { return {half_load_i8(p), half_load_i8(p + 8)}; }

struct nibbles { __m256i lo, hi; };
OCTAVO_INLINE nibbles n_load(const uint8_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
OCTAVO_INLINE int nibble_shift(int j) { return 8 * (j % 4) + 4 * (j / 4); }
OCTAVO_INLINE __m256 half_signed(__m256i n, int j) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(n, 28 - nibble_shift(j)), 28));
}
OCTAVO_INLINE __m256 half_unsigned(__m256i n, int j) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(n, nibble_shift(j)), _mm256_set1_epi32(15)));
}
OCTAVO_INLINE vec v_nibble_signed(nibbles n, int j) { return {half_signed(n.lo, j), half_signed(n.hi, j)}; }
OCTAVO_INLINE vec v_nibble_unsigned(nibbles n, int j) { return {half_unsigned(n.lo, j), half_unsigned(n.hi, j)}; }
