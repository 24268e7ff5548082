// vec on AVX-512: one register. See vec_portable.h for what each function means; included inside an ISA's namespace.

struct vec { __m512 v; };

// A GEMM tile that fits the 32 registers: 12 rows by 2 panels of accumulators, 2 weights, the broadcasts from memory.
constexpr int kTileRows = 12;
constexpr int kWideRows = 12;  // up to this many rows take two panels at once
constexpr int kQuadRows = 4;   // up to this many rows take four panels of codes at once
constexpr int kRunUnroll = 8;  // of a loop over eight codes

OCTAVO_INLINE vec v_zero() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE vec v_set1(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE vec v_load(const float *p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void v_store(float *p, vec a) { _mm512_storeu_ps(p, a.v); }

OCTAVO_INLINE __mmask16 lane_mask(int64_t n) { return __mmask16((1u << n) - 1u); }

OCTAVO_INLINE vec v_load_n(const float *p, int64_t n) { return {_mm512_maskz_loadu_ps(lane_mask(n), p)}; }
OCTAVO_INLINE void v_store_n(float *p, vec a, int64_t n) { _mm512_mask_storeu_ps(p, lane_mask(n), a.v); }

OCTAVO_INLINE vec v_join(vec a, vec b, int64_t n) { return {_mm512_mask_mov_ps(b.v, lane_mask(n), a.v)}; }

OCTAVO_INLINE vec v_add(vec a, vec b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_sub(vec a, vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_mul(vec a, vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_div(vec a, vec b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE vec v_fnma(vec a, vec b, vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE vec v_max(vec a, vec b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_min(vec a, vec b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE vec v_rint(vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OCTAVO_INLINE vec v_pow2(vec n) {
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

OCTAVO_INLINE float v_hsum(vec a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float v_hmax(vec a) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

OCTAVO_INLINE vec widen_bf16(__m256i h) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
OCTAVO_INLINE __m256i narrow_bf16(vec a) {
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
OCTAVO_INLINE vec v_load_bf16(const uint16_t *p) { return widen_bf16(_mm256_loadu_si256((const __m256i *)p)); }
OCTAVO_INLINE vec v_load_bf16_n(const uint16_t *p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(lane_mask(n), p));
}
OCTAVO_INLINE void v_store_bf16(uint16_t *p, vec a) { _mm256_storeu_si256((__m256i *)p, narrow_bf16(a)); }
OCTAVO_INLINE void v_store_bf16_n(uint16_t *p, vec a, int64_t n) {
    _mm256_mask_storeu_epi16(p, lane_mask(n), narrow_bf16(a));
}

OCTAVO_INLINE __m256i narrow_f16(vec a) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE vec v_load_f16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
OCTAVO_INLINE vec v_load_f16_n(const uint16_t *p, int64_t n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane_mask(n), p))};
}
OCTAVO_INLINE void v_store_f16(uint16_t *p, vec a) { _mm256_storeu_si256((__m256i *)p, narrow_f16(a)); }
OCTAVO_INLINE void v_store_f16_n(uint16_t *p, vec a, int64_t n) {
    _mm256_mask_storeu_epi16(p, lane_mask(n), narrow_f16(a));
}

OCTAVO_INLINE vec v_load_i8(const int8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}

// A code of four bits picks its number from a register: permutes read the low four bits of each lane and no others.
struct nibbles { __m512i n; };
OCTAVO_INLINE nibbles n_load(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE vec pick_nibble(nibbles n, int j, __m512 table) {
    int shift = 8 * (j % 4) + 4 * (j / 4);
    return {_mm512_permutexvar_ps(shift ? _mm512_srli_epi32(n.n, unsigned(shift)) : n.n, table)};
}
OCTAVO_INLINE vec v_nibble_signed(nibbles n, int j) {
    return pick_nibble(n, j, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
}
OCTAVO_INLINE vec v_nibble_unsigned(nibbles n, int j) {
    return pick_nibble(n, j, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
