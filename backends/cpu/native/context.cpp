// Contexts, the choice of instruction set, and the exported entry points: each locks its context's pool and calls the
// table's kernel. Compiled for the baseline instruction set.
#include <stdlib.h>

#include "kernels.h"

namespace octavo {

#if defined(__x86_64__)
namespace avx512 { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
#elif defined(__aarch64__)
namespace neon { extern const KernelTable table; }
#endif
namespace portable { extern const KernelTable table; }

namespace {

constexpr int kMaxThreads = 1024;

struct Candidate {
    const KernelTable *table;
    bool runs;
};

// The best table that this machine runs and whose name is `isa` (any name if nullptr).
const KernelTable *choose(const char *isa) {
    const Candidate candidates[] = {
#if defined(__x86_64__)
        {&avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
        {&avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#elif defined(__aarch64__)
        {&neon::table, true},
#endif
        {&portable::table, true},
    };
    for (const Candidate &candidate : candidates) {
        if (candidate.runs && (!isa || strcmp(isa, candidate.table->isa) == 0)) return candidate.table;
    }
    return nullptr;
}

struct Entry {
    const char *name;
    void *kernel;
    int64_t args_bytes;
};

const Entry kEntries[] = {
#define OCTAVO_ENTRY(name, Args) {#name, reinterpret_cast<void *>(&octavo_##name), int64_t(sizeof(Args))},
    OCTAVO_KERNELS(OCTAVO_ENTRY)
#undef OCTAVO_ENTRY
};

const Entry *find(const char *name) {
    for (const Entry &entry : kEntries) {
        if (strcmp(entry.name, name) == 0) return &entry;
    }
    return nullptr;
}

}  // namespace
}  // namespace octavo

extern "C" {

OctavoContext *octavo_context_create(int num_threads, const char *isa) {
    const octavo::KernelTable *table = octavo::choose(isa);
    if (!table || num_threads < 1 || num_threads > octavo::kMaxThreads) return nullptr;
    OctavoContext *ctx = static_cast<OctavoContext *>(malloc(sizeof(OctavoContext)));
    octavo::Pool *pool = ctx ? octavo::pool_create(num_threads) : nullptr;
    if (!pool) {
        free(ctx);
        return nullptr;
    }
    *ctx = {pool, table};
    return ctx;
}

void octavo_context_destroy(OctavoContext *ctx) {
    if (!ctx) return;
    octavo::pool_destroy(ctx->pool);
    free(ctx);
}

const char *octavo_context_isa(const OctavoContext *ctx) { return ctx->table->isa; }

const char *octavo_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "g++ " __VERSION__;
#endif
}

int octavo_isa_supported(const char *isa) { return octavo::choose(isa) != nullptr; }

void *octavo_kernel(const char *name) {
    const octavo::Entry *entry = octavo::find(name);
    return entry ? entry->kernel : nullptr;
}

int64_t octavo_args_bytes(const char *name) {
    const octavo::Entry *entry = octavo::find(name);
    return entry ? entry->args_bytes : 0;
}

int octavo_replay(const OctavoCall *calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; ++i) {
        int status = calls[i].kernel(calls[i].args);
        if (status != OCTAVO_OK) return status;
    }
    return OCTAVO_OK;
}

#define OCTAVO_EXPORT(name, Args) \
    int octavo_##name(const Args *args) { \
        octavo::pool_lock(args->ctx->pool); \
        int status = args->ctx->table->name(args); \
        octavo::pool_unlock(args->ctx->pool); \
        return status; \
    }
OCTAVO_KERNELS(OCTAVO_EXPORT)
#undef OCTAVO_EXPORT

}  // extern "C"
