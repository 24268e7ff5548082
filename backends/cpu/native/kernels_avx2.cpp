// All kernels for AVX2 + FMA + F16C.
#include "kernels.h"

#define OCTAVO_AVX2  // the pragma below need not define the compiler's own __AVX2__

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace octavo {
namespace avx2 {
#include "vec_avx2.h"
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
OCTAVO_TABLE("avx2")
}  // namespace avx2
}  // namespace octavo

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
