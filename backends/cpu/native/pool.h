// A context's threads: tiles of one job handed out dynamically, a brief spin inside a step, sleep between steps.
//
//     caller (worker 0) ──┐
//     worker 1 ───────────┼── claim tiles from `unclaimed` ── run ── subtract from `unfinished`
//     worker n-1 ─────────┘
//
// A job is finished when its tiles are, not when every worker has looked at it: a worker that lost its core to another
// process before claiming a tile delays nobody, and the caller works like the rest. So a busy neighbour slows a step
// instead of stopping it at each barrier. Waiting is bounded: pause, then yield, then sleep.
//
// After fork() the child's pools have no threads; a pthread_atfork handler resets them and the next job starts new ones.
// Only context.cpp creates and locks pools; kernels call the functions below the line, with the pool locked for them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

struct Pool;

Pool *pool_create(int num_threads);  // nullptr when memory is short
void pool_destroy(Pool *pool);       // joins its threads; no job may be running

// Exclusive use of the pool, its shared and its per-worker scratch, for one kernel call.
void pool_lock(Pool *pool);
void pool_unlock(Pool *pool);

// ---- for kernels -------------------------------------------------------------------------------------------------------

// Runs tiles [begin, end) of a job. worker in [0, pool_num_threads): no two calls with one worker overlap.
typedef void (*TileFn)(void *job, int64_t begin, int64_t end, int worker);

// Calls fn over [0, tiles) in disjoint ranges, on all threads, and returns when all have returned. Not reentrant: fn must
// not call parallel_for. What the caller wrote before is visible to fn, what fn wrote is visible after.
void parallel_for(Pool *pool, int64_t tiles, TileFn fn, void *job);

int pool_num_threads(const Pool *pool);

// Gives every worker at least `bytes` of scratch, 64-byte aligned, contents undefined; false when memory is short.
// Call before parallel_for; the buffers stay valid until the next reserve.
bool pool_reserve_scratch(Pool *pool, size_t bytes);
void *pool_scratch(const Pool *pool, int worker);

// At least `bytes` shared by all workers, 64-byte aligned, contents undefined; nullptr when memory is short. One buffer:
// the next call may move it.
void *pool_shared(Pool *pool, size_t bytes);

}  // namespace octavo
