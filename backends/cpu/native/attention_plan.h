// How one attention call is cut into work, and where its partial results lie.
//
//     unit = (request, up to 72 rows of queries x heads of one KV head)          all rows of a unit share every key tile
//     item = (unit, run of splits)                                               one tile of the pool's job
//
//     keys   0        512       1024      1536  L
//            |-- split 0 --|-- split 1 --|-- split 2 --|- 3 -|                   boundaries absolute, never the batch's
//     items  |------ item 0 -------------|------ item 1 -----|                   only when a unit is too big a share
//
// A unit that is one item folds its splits one after the other in the worker's scratch. A unit of several items leaves each
// split's state (sums, maxima, denominators) in shared memory and whoever ends last folds them, in the same order by the
// same arithmetic: how units are cut never shows in the result. The list is derived inside the call, from lengths it reads
// there, so that a recorded call can't use stale ones; it costs some ten nanoseconds a unit.
#pragma once

#include "octavo_cpu.h"
#include "pool.h"

namespace octavo {

constexpr int kLanes = 16;         // keys of a vector
constexpr int kTileKeys = 64;
constexpr int kSplitKeys = 512;
constexpr int kUnitRows = 72;      // a multiple of the kernels' six rows, and of many group sizes
constexpr int kMaxHeadDim = 576;

struct AttentionItem {
    int32_t request;
    int32_t query, num_queries;       // of the request
    int32_t split_begin, split_end;
    int32_t unit_splits;              // splits of the whole unit when it has several items, else 0
    int64_t first_state;              // of head group 0, in states; the next group's follow
    int64_t counter;                  // of head group 0: splits of the unit still to do
};

struct AttentionPlan {
    const PagedAttentionArgs *args;
    int64_t group_heads;       // query heads per KV head
    int64_t chunks;            // head groups of one KV head: 1 unless group_heads > kUnitRows
    int64_t head_groups;       // num_kv_heads * chunks; the pool's tile t is (item t / head_groups, head group t % head_groups)
    int64_t unit_queries;      // query tokens of a unit at most
    int64_t v_width;           // v_head_dim rounded up to 16: length of a row of sums
    int64_t num_items, num_states, num_counters;
    int64_t unit_rows;         // rows of the largest unit of this call
    int64_t state_floats;      // of one state: unit_rows * (v_width + 2)
    AttentionItem *items;
    float *states;
    int32_t *counters;         // zero-based count-downs, accessed atomically
};

// Keys [lo, hi) that a row at `position` sees of `length`.
static inline void visible_keys(const PagedAttentionArgs *a, int64_t position, int64_t length, int64_t *lo, int64_t *hi) {
    *hi = a->causal && position + 1 < length ? position + 1 : length;
    *lo = a->window > 0 && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
    if (*hi < *lo) *hi = *lo;
}

static inline int64_t keys_of(const PagedAttentionArgs *a, int64_t request) {
    return a->seq_lens ? a->seq_lens[request] : a->kv_start[request + 1] - a->kv_start[request];
}

// Validates, cuts, and takes shared memory from the args' pool. OCTAVO_OK, EINVAL or ENOMEM.
int attention_plan(const PagedAttentionArgs *args, AttentionPlan *plan);

extern const float kZeroRow[kMaxHeadDim];    // what stands for a key that may not be read, in any dtype
extern const float kTileOffsets[kTileKeys];  // 0, 1, 2, ...

}  // namespace octavo
