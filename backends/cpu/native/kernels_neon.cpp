// All kernels for 64-bit ARM, whose baseline includes NEON with fused multiply-add and fp16 conversion.
#include "kernels.h"

#if defined(__aarch64__)
namespace octavo {
namespace neon {
#include "vec_neon.h"
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
OCTAVO_TABLE("neon")
}  // namespace neon
}  // namespace octavo
#endif
