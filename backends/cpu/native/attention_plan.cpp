// Compiled once, for the baseline instruction set: nothing here depends on the kernels' vectors.
#include "attention_plan.h"

#include "kernels.h"

namespace octavo {

alignas(64) const float kZeroRow[kMaxHeadDim] = {};
alignas(64) const float kTileOffsets[kTileKeys] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

namespace {

constexpr int64_t kItemsPerThread = 4;  // an item is at most this share of a thread's part of the call
constexpr int64_t kTileOverhead = 8;    // preparing a key tile costs as much as this many rows

struct Unit {
    int64_t query, num_queries;
    int64_t split_begin, split_end;
    int64_t cost;  // of one head group
};

Unit unit_at(const AttentionPlan *plan, int64_t query, int64_t total_queries, int64_t length) {
    Unit unit = {query, min64(plan->unit_queries, total_queries - query), 0, 0, 1};
    int64_t lo, hi, unused;
    int64_t position = length - total_queries + query;
    visible_keys(plan->args, position, length, &lo, &unused);
    visible_keys(plan->args, position + unit.num_queries - 1, length, &unused, &hi);
    if (hi <= lo) return unit;
    unit.split_begin = lo / kSplitKeys;
    unit.split_end = ceil_div(hi, kSplitKeys);
    int64_t rows = unit.num_queries * min64(plan->group_heads, kUnitRows);
    unit.cost = (ceil_div(hi, kTileKeys) - lo / kTileKeys) * (rows + kTileOverhead);
    return unit;
}

// Cuts every request, its last queries first since they are the longest; writes items only when there is a list.
void cut(AttentionPlan *plan, int64_t limit, int64_t *total_cost) {
    const PagedAttentionArgs *a = plan->args;
    plan->num_items = plan->num_states = plan->num_counters = 0;
    *total_cost = 0;
    for (int64_t b = 0; b < a->num_requests; ++b) {
        int64_t queries = a->query_start[b + 1] - a->query_start[b];
        int64_t length = keys_of(a, b);
        for (int64_t i = ceil_div(queries, plan->unit_queries) - 1; i >= 0; --i) {
            Unit unit = unit_at(plan, i * plan->unit_queries, queries, length);
            *total_cost += unit.cost * plan->head_groups;
            plan->unit_rows = max64(plan->unit_rows, unit.num_queries * min64(plan->group_heads, kUnitRows));
            int64_t splits = unit.split_end - unit.split_begin;
            int64_t run = unit.cost > limit ? max64(1, splits * limit / unit.cost) : max64(1, splits);
            bool whole = run >= splits;
            for (int64_t s = unit.split_begin; s < unit.split_end || s == unit.split_begin; s += run) {
                if (plan->items) {
                    plan->items[plan->num_items] = {
                        int32_t(b), int32_t(unit.query), int32_t(unit.num_queries), int32_t(s),
                        int32_t(min64(s + run, unit.split_end)), whole ? 0 : int32_t(splits),
                        plan->num_states, plan->num_counters};
                }
                ++plan->num_items;
            }
            if (whole) continue;
            if (plan->items) {
                for (int64_t g = 0; g < plan->head_groups; ++g) plan->counters[plan->num_counters + g] = int32_t(splits);
            }
            plan->num_states += splits * plan->head_groups;
            plan->num_counters += plan->head_groups;
        }
    }
}

bool valid(const PagedAttentionArgs *a) {
    if (a->num_heads < 1 || a->num_kv_heads < 1 || a->num_heads % a->num_kv_heads != 0) return false;
    if (a->head_dim < 1 || a->head_dim > kMaxHeadDim || a->v_head_dim < 1 || a->v_head_dim > kMaxHeadDim) return false;
    if (a->q_tail && (a->tail_dim < 0 || a->tail_dim > a->head_dim)) return false;
    if (a->kv_dtype < OCTAVO_F32 || a->kv_dtype > OCTAVO_E4M3 || a->window < 0 || a->block_size < 1) return false;
    if ((a->block_table == nullptr) == (a->kv_start == nullptr)) return false;
    if (a->k_stride_d != 1 && (!a->block_table || a->k_stride_s != 1 || a->block_size % kLanes != 0)) return false;
    for (int64_t b = 0; b < a->num_requests; ++b) {
        int64_t length = keys_of(a, b);
        if (length < 0 || a->query_start[b + 1] < a->query_start[b]) return false;
        if (a->block_table && ceil_div(length, a->block_size) > a->table_width) return false;
    }
    return true;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

int attention_plan(const PagedAttentionArgs *a, AttentionPlan *plan) {
    if (!valid(a)) return OCTAVO_EINVAL;
    *plan = {};
    plan->args = a;
    plan->group_heads = a->num_heads / a->num_kv_heads;
    plan->chunks = ceil_div(plan->group_heads, kUnitRows);
    plan->head_groups = a->num_kv_heads * plan->chunks;
    plan->unit_queries = max64(1, kUnitRows / plan->group_heads);
    plan->v_width = ceil_div(a->v_head_dim, 16) * 16;

    int threads = pool_num_threads(a->ctx->pool);
    int64_t cost;
    cut(plan, INT64_MAX, &cost);
    int64_t limit = threads == 1 ? INT64_MAX : max64(1, cost / (threads * kItemsPerThread));
    if (threads > 1) cut(plan, limit, &cost);

    plan->state_floats = plan->unit_rows * (plan->v_width + 2);
    size_t item_bytes = aligned(size_t(plan->num_items) * sizeof(AttentionItem));
    size_t counter_bytes = aligned(size_t(plan->num_counters) * sizeof(int32_t));
    size_t state_bytes = size_t(plan->num_states * plan->state_floats) * sizeof(float);
    char *memory = static_cast<char *>(pool_shared(a->ctx->pool, item_bytes + counter_bytes + state_bytes + 64));
    if (!memory) return OCTAVO_ENOMEM;
    plan->items = reinterpret_cast<AttentionItem *>(memory);
    plan->counters = reinterpret_cast<int32_t *>(memory + item_bytes);
    plan->states = reinterpret_cast<float *>(memory + item_bytes + counter_bytes);
    cut(plan, limit, &cost);
    return OCTAVO_OK;
}

}  // namespace octavo
