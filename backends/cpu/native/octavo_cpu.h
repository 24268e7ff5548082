/* The C interface of Octavo's CPU kernels: all that Python sees, by ctypes.
 *
 *   engine ── OctavoContext ──┬── Pool            its threads and scratch memory (pool.h)
 *                             └── KernelTable     one instruction set's kernels  (kernels.h)
 *
 * A context belongs to one engine; nothing here is process-wide, so engines with other thread counts or instruction sets
 * live side by side. Every kernel has the form `int octavo_<name>(const <Name>Args *)`, returns an OctavoStatus, writes
 * only what its Args call out, and allocates nothing that outlives the call except scratch kept by the context. Calls on one
 * context are serialised; calls on different contexts run at once.
 *
 * Conventions: strides are in elements; every innermost dimension is contiguous; sizes are int64; pointers need the
 * alignment of their element only. 16-bit values travel as uint16_t bit patterns.
 */
#ifndef OCTAVO_CPU_H
#define OCTAVO_CPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OCTAVO_API __attribute__((visibility("default")))

typedef struct OctavoContext OctavoContext;

typedef enum OctavoStatus {
    OCTAVO_OK = 0,
    OCTAVO_EINVAL = 1, /* an argument is out of range: the caller's bug */
    OCTAVO_ENOMEM = 2, /* scratch memory could not be had */
    OCTAVO_ENOKERNEL = 3 /* no kernel of that name */
} OctavoStatus;

typedef enum OctavoDtype {
    OCTAVO_F32 = 0,
    OCTAVO_BF16 = 1,
    OCTAVO_F16 = 2,
    OCTAVO_I8 = 3,  /* of KV only, as the next one */
    OCTAVO_E4M3 = 4 /* fp8 e4m3fn */
} OctavoDtype;

/* One recorded kernel call; `kernel` is the address that octavo_kernel() returned. */
typedef struct OctavoCall {
    int (*kernel)(const void *args);
    const void *args;
} OctavoCall;

/* A context with `num_threads` threads, the caller's included (1..1024).
 * isa: "avx512" | "avx2" | "neon" | "portable", or NULL for the best this machine runs.
 * NULL when the ISA is unknown or can't run here, or memory is short. Threads start at the first parallel call. */
OCTAVO_API OctavoContext *octavo_context_create(int num_threads, const char *isa);
OCTAVO_API void octavo_context_destroy(OctavoContext *ctx);
OCTAVO_API const char *octavo_context_isa(const OctavoContext *ctx);

/* What compiled the library, with its version: "g++ 12.2.0". */
OCTAVO_API const char *octavo_compiler(void);

/* 1 when this machine runs the named instruction set's kernels and they were compiled in. */
OCTAVO_API int octavo_isa_supported(const char *isa);

/* Address and sizeof(Args) of a kernel by its name without the prefix ("gemm"); NULL and 0 when there is none. */
OCTAVO_API void *octavo_kernel(const char *name);
OCTAVO_API int64_t octavo_args_bytes(const char *name);

/* Runs the calls in order; stops at the first that fails and returns its status, else OCTAVO_OK. */
OCTAVO_API int octavo_replay(const OctavoCall *calls, int64_t num_calls);

#ifdef __cplusplus
}
#endif

#include "codes.h"
#include "gemm.h"
#include "attention.h"
#include "elementwise.h"
#include "sample.h"

/* Every kernel: X(name, ArgsType). Tables, exports and look-ups are generated from this list. */
#define OCTAVO_KERNELS(X) \
    OCTAVO_GEMM_KERNELS(X) OCTAVO_CODES_KERNELS(X) OCTAVO_ATTENTION_KERNELS(X) OCTAVO_ELEMENTWISE_KERNELS(X) \
    OCTAVO_SAMPLE_KERNELS(X)

#ifdef __cplusplus
extern "C" {
#endif
#define OCTAVO_DECLARE(name, Args) OCTAVO_API int octavo_##name(const Args *args);
OCTAVO_KERNELS(OCTAVO_DECLARE)
#undef OCTAVO_DECLARE
#ifdef __cplusplus
}
#endif

#endif
