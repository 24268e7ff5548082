// Functions of vec built from its primitives, hence with the same bits on every instruction set. Included after a vec_<isa>.h.

#ifdef OCTAVO_TAILS_BY_COPY
#undef OCTAVO_TAILS_BY_COPY
// The first n 16-bit values, 0 <= n <= 16; the others load as zero, and are not stored.
OCTAVO_INLINE vec v_load_bf16_n(const uint16_t *p, int64_t n) {
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, size_t(n) * sizeof(uint16_t));
    return v_load_bf16(lanes);
}
OCTAVO_INLINE void v_store_bf16_n(uint16_t *p, vec a, int64_t n) {
    uint16_t lanes[16];
    v_store_bf16(lanes, a);
    memcpy(p, lanes, size_t(n) * sizeof(uint16_t));
}
OCTAVO_INLINE vec v_load_f16_n(const uint16_t *p, int64_t n) {
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, size_t(n) * sizeof(uint16_t));
    return v_load_f16(lanes);
}
OCTAVO_INLINE void v_store_f16_n(uint16_t *p, vec a, int64_t n) {
    uint16_t lanes[16];
    v_store_f16(lanes, a);
    memcpy(p, lanes, size_t(n) * sizeof(uint16_t));
}
#endif

// e^x, within 1 ulp or so; 0 below -104, infinity above 88.73, NaN stays.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor series to degree 7; 2^n in two factors, so that subnormals round once.
OCTAVO_INLINE vec v_exp(vec x) {
    x = v_min(v_set1(89.0f), v_max(v_set1(-104.0f), x));
    vec n = v_rint(v_mul(x, v_set1(1.44269504f)));
    vec r = v_fnma(n, v_set1(0.693145751953125f), x);  // ln 2 in two parts (Cody & Waite): n times the first is exact
    r = v_fnma(n, v_set1(1.42860677e-6f), r);
    vec p = v_set1(1.98412698e-4f);
    p = v_fma(p, r, v_set1(1.38888889e-3f));
    p = v_fma(p, r, v_set1(8.33333333e-3f));
    p = v_fma(p, r, v_set1(4.16666667e-2f));
    p = v_fma(p, r, v_set1(1.66666667e-1f));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    vec half = v_rint(v_mul(n, v_set1(0.5f)));
    return v_mul(v_mul(p, v_pow2(half)), v_pow2(v_sub(n, half)));
}

// 1 / (1 + e^-x)
OCTAVO_INLINE vec v_sigmoid(vec x) { return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }

// x sigmoid(x)
OCTAVO_INLINE vec v_silu(vec x) { return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x sigmoid(2 u)  (Hendrycks & Gimpel 2016)
OCTAVO_INLINE vec v_gelu_tanh(vec x) {
    vec cubic = v_fma(v_mul(v_mul(x, x), x), v_set1(0.044715f), x);
    vec minus_2u = v_mul(cubic, v_set1(-1.59576912f));
    return v_div(x, v_add(v_set1(1.0f), v_exp(minus_2u)));
}
