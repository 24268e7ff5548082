// All kernels in plain C++, for any processor: the baseline, and the oracle of the others' bits.
#include "kernels.h"

namespace octavo {
namespace portable {
#include "vec_portable.h"
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
OCTAVO_TABLE("portable")
}  // namespace portable
}  // namespace octavo
