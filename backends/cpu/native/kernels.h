// What every instruction set's kernels share: system headers, the context, the table of kernels.
//
// A kernels_<isa>.cpp includes this first, then switches the target by pragma, then opens its own namespace and includes
// vec_<isa>.h, vec_math.h and one .inc per kernel family. Nothing after the pragma may use a std template or a lambda: the
// former would emit a weak symbol with that ISA's instructions that all of the process might run, the latter loses the target.
#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention_plan.h"
#include "octavo_cpu.h"
#include "pool.h"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo {

struct KernelTable {
    const char *isa;
#define OCTAVO_MEMBER(name, Args) int (*name)(const Args *);
    OCTAVO_KERNELS(OCTAVO_MEMBER)
#undef OCTAVO_MEMBER
};

// Inside an ISA's namespace, after its kernels: the table that names them all.
#define OCTAVO_TABLE_ENTRY(name, Args) , name
#define OCTAVO_TABLE(isa) \
    extern const KernelTable table; \
    const KernelTable table = {isa OCTAVO_KERNELS(OCTAVO_TABLE_ENTRY)};

OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
OCTAVO_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
// Bytes of a stored element of KV.
constexpr int64_t stored_bytes(int dtype) { return dtype == OCTAVO_F32 ? 4 : dtype >= OCTAVO_I8 ? 1 : 2; }
OCTAVO_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace octavo

struct OctavoContext {
    octavo::Pool *pool;
    const octavo::KernelTable *table;
};
