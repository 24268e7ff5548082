// All kernels for AVX-512 (F, BW, VL, DQ).
#include "kernels.h"

#define OCTAVO_AVX512  // the pragma below need not define the compiler's own __AVX512F__

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace octavo {
namespace avx512 {
#include "vec_avx512.h"
#include "vec_math.h"
#include "vec_bytes.h"
#include "gemm_tile.inc"
#include "gemm_codes.inc"
#include "gemm.inc"
#include "pack.inc"
#include "attention_tile.inc"
#include "attention.inc"
#include "rows.inc"
#include "cache.inc"
#include "sample.inc"
OCTAVO_TABLE("avx512")
}  // namespace avx512
}  // namespace octavo

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
