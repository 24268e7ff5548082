#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>
#include <new>

namespace octavo {
namespace {

constexpr size_t kCacheLine = 64;
constexpr int64_t kPauseNs = 20 * 1000;   // spin with pauses this long,
constexpr int64_t kSpinNs = 150 * 1000;   // then give up the core at each turn until this, then sleep
constexpr int64_t kClaimShare = 2;        // a claim takes 1 / (kClaimShare * threads) of what is left, at least one tile

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

struct Buffer {
    void *data = nullptr;
    size_t bytes = 0;

    bool grow(size_t wanted) {
        if (wanted <= bytes) return true;
        void *fresh = nullptr;
        if (posix_memalign(&fresh, kCacheLine, wanted) != 0) return false;
        free(data);
        data = fresh;
        bytes = wanted;
        return true;
    }
};

}  // namespace

struct WorkerSlot {
    Pool *pool;
    int index;
    pthread_t thread;
    Buffer scratch;
};

struct Pool {
    // The job: written by the caller while no tile is unclaimed or unfinished, read by whoever holds a claimed tile.
    TileFn fn = nullptr;
    void *job = nullptr;
    int64_t tiles = 0;

    alignas(kCacheLine) std::atomic<int64_t> unclaimed{0};
    alignas(kCacheLine) std::atomic<int64_t> unfinished{0};
    alignas(kCacheLine) std::atomic<int> sleepers{0};
    std::atomic<bool> caller_sleeps{false};
    std::atomic<bool> stop{false};

    pthread_mutex_t use_mutex;   // held for a kernel call
    pthread_mutex_t park_mutex;  // guards the two condition variables
    pthread_cond_t work_cond;
    pthread_cond_t done_cond;

    int num_threads = 1;
    int num_started = 0;  // threads running, the caller not counted
    bool started = false;
    WorkerSlot *workers = nullptr;  // [num_threads]; slot 0 is the caller's and has no thread
    Buffer shared;

    Pool *next = nullptr;  // the list of live pools, for fork
    Pool *previous = nullptr;
};

namespace {

// The live pools of this process: only the fork handlers walk it. Its mutex is held across fork().
struct Registry {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    Pool *first = nullptr;
    bool handlers_set = false;
};
Registry registry;

void init_sync(Pool *pool) {
    pthread_mutex_init(&pool->use_mutex, nullptr);
    pthread_mutex_init(&pool->park_mutex, nullptr);
    pthread_cond_init(&pool->work_cond, nullptr);
    pthread_cond_init(&pool->done_cond, nullptr);
}

void before_fork() { pthread_mutex_lock(&registry.mutex); }

void after_fork_in_parent() { pthread_mutex_unlock(&registry.mutex); }

void after_fork_in_child() {
    pthread_mutex_init(&registry.mutex, nullptr);
    for (Pool *pool = registry.first; pool; pool = pool->next) {
        init_sync(pool);  // another thread may have held them, and that thread is gone
        pool->unclaimed.store(0);
        pool->unfinished.store(0);
        pool->sleepers.store(0);
        pool->caller_sleeps.store(false);
        pool->num_started = 0;
        pool->started = false;
    }
}

void registry_add(Pool *pool) {
    pthread_mutex_lock(&registry.mutex);
    if (!registry.handlers_set) {
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        registry.handlers_set = true;
    }
    pool->next = registry.first;
    if (registry.first) registry.first->previous = pool;
    registry.first = pool;
    pthread_mutex_unlock(&registry.mutex);
}

void registry_remove(Pool *pool) {
    pthread_mutex_lock(&registry.mutex);
    (pool->previous ? pool->previous->next : registry.first) = pool->next;
    if (pool->next) pool->next->previous = pool->previous;
    pthread_mutex_unlock(&registry.mutex);
}

// Bounded waiting: turn() returns false when it is time to sleep.
struct Spin {
    int64_t start = 0;
    unsigned turns = 0;
    bool yielding = false;

    bool turn() {
        if (yielding) sched_yield();
        else cpu_pause();
        if (++turns % (yielding ? 4 : 64) != 0) return true;
        int64_t now = now_ns();
        if (start == 0) start = now;
        yielding = now - start > kPauseNs;
        return now - start < kSpinNs;
    }
};

void finish(Pool *pool, int64_t count) {
    if (pool->unfinished.fetch_sub(count) == count && pool->caller_sleeps.load()) {
        pthread_mutex_lock(&pool->park_mutex);
        pthread_cond_signal(&pool->done_cond);
        pthread_mutex_unlock(&pool->park_mutex);
    }
}

// Claims and runs tiles until none is unclaimed. A successful claim pins the job: its fields can't change before finish().
// (So a value of `unclaimed` read from an earlier job does no harm: if the exchange succeeds, it is a claim on this one.)
void work(Pool *pool, int worker) {
    int64_t left = pool->unclaimed.load(std::memory_order_acquire);
    while (left > 0) {
        int64_t take = left / (kClaimShare * pool->num_threads);
        if (take < 1) take = 1;
        if (!pool->unclaimed.compare_exchange_weak(left, left - take)) continue;
        int64_t begin = pool->tiles - left;
        pool->fn(pool->job, begin, begin + take, worker);
        finish(pool, take);
        left = pool->unclaimed.load(std::memory_order_acquire);
    }
}

void sleep_until_work(Pool *pool) {
    pthread_mutex_lock(&pool->park_mutex);
    pool->sleepers.fetch_add(1);
    while (pool->unclaimed.load() == 0 && !pool->stop.load()) pthread_cond_wait(&pool->work_cond, &pool->park_mutex);
    pool->sleepers.fetch_sub(1);
    pthread_mutex_unlock(&pool->park_mutex);
}

void wake_workers(Pool *pool) {
    if (pool->sleepers.load() == 0) return;
    pthread_mutex_lock(&pool->park_mutex);
    pthread_cond_broadcast(&pool->work_cond);
    pthread_mutex_unlock(&pool->park_mutex);
}

void wait_until_done(Pool *pool) {
    for (Spin spin; pool->unfinished.load(std::memory_order_acquire) != 0;) {
        if (spin.turn()) continue;
        pthread_mutex_lock(&pool->park_mutex);
        pool->caller_sleeps.store(true);
        while (pool->unfinished.load() != 0) pthread_cond_wait(&pool->done_cond, &pool->park_mutex);
        pool->caller_sleeps.store(false);
        pthread_mutex_unlock(&pool->park_mutex);
    }
}

void *worker_main(void *argument) {
    WorkerSlot *slot = static_cast<WorkerSlot *>(argument);
    Pool *pool = slot->pool;
    while (!pool->stop.load(std::memory_order_acquire)) {
        work(pool, slot->index);
        Spin spin;
        while (pool->unclaimed.load(std::memory_order_relaxed) == 0 && !pool->stop.load(std::memory_order_relaxed)) {
            if (spin.turn()) continue;
            sleep_until_work(pool);
            break;
        }
    }
    return nullptr;
}

// Starts what threads can be had; with fewer than asked for the rest share the tiles.
void start_workers(Pool *pool) {
    pool->started = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals stay with the program's own threads
    for (int i = 1; i < pool->num_threads; ++i) {
        if (pthread_create(&pool->workers[i].thread, nullptr, worker_main, &pool->workers[i]) != 0) break;
        pool->num_started = i;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

Pool *pool_create(int num_threads) {
    void *memory = nullptr;
    if (posix_memalign(&memory, kCacheLine, sizeof(Pool)) != 0) return nullptr;
    Pool *pool = new (memory) Pool();
    pool->workers = static_cast<WorkerSlot *>(calloc(size_t(num_threads), sizeof(WorkerSlot)));
    if (!pool->workers) {
        free(memory);
        return nullptr;
    }
    pool->num_threads = num_threads;
    for (int i = 0; i < num_threads; ++i) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i;
    }
    init_sync(pool);
    registry_add(pool);
    return pool;
}

void pool_destroy(Pool *pool) {
    registry_remove(pool);
    pool->stop.store(true);
    pthread_mutex_lock(&pool->park_mutex);
    pthread_cond_broadcast(&pool->work_cond);
    pthread_mutex_unlock(&pool->park_mutex);
    for (int i = 1; i <= pool->num_started; ++i) pthread_join(pool->workers[i].thread, nullptr);
    for (int i = 0; i < pool->num_threads; ++i) free(pool->workers[i].scratch.data);
    free(pool->shared.data);
    free(pool->workers);
    pool->~Pool();
    free(pool);
}

void pool_lock(Pool *pool) { pthread_mutex_lock(&pool->use_mutex); }

void pool_unlock(Pool *pool) { pthread_mutex_unlock(&pool->use_mutex); }

void parallel_for(Pool *pool, int64_t tiles, TileFn fn, void *job) {
    if (tiles <= 0) return;
    if (tiles == 1 || pool->num_threads == 1) {
        fn(job, 0, tiles, 0);
        return;
    }
    if (!pool->started) start_workers(pool);
    pool->fn = fn;
    pool->job = job;
    pool->tiles = tiles;
    pool->unfinished.store(tiles);
    pool->unclaimed.store(tiles);
    wake_workers(pool);
    work(pool, 0);
    wait_until_done(pool);
}

int pool_num_threads(const Pool *pool) { return pool->num_threads; }

bool pool_reserve_scratch(Pool *pool, size_t bytes) {
    for (int i = 0; i < pool->num_threads; ++i) {
        if (!pool->workers[i].scratch.grow(bytes)) return false;
    }
    return true;
}

void *pool_scratch(const Pool *pool, int worker) { return pool->workers[worker].scratch.data; }

void *pool_shared(Pool *pool, size_t bytes) { return pool->shared.grow(bytes) ? pool->shared.data : nullptr; }

}  // namespace octavo
