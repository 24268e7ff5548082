/* Arguments of the row kernels and of the writes and copies of KV blocks. Part of octavo_cpu.h; include that. */
#ifndef OCTAVO_ELEMENTWISE_H
#define OCTAVO_ELEMENTWISE_H

typedef enum OctavoGate { OCTAVO_GATE_SILU = 0, OCTAVO_GATE_GELU_TANH = 1, OCTAVO_GATE_GELU = 2 } OctavoGate;

/* residual += x, if there is one; out = x / sqrt(mean(x^2) + eps) * weight. One order of summation per row width. */
typedef struct RmsNormArgs {
    OctavoContext *ctx;
    const float *x;      /* [T, H, M] */
    const float *weight; /* [M] */
    float *residual;     /* [T, H, M], updated in place, or NULL */
    float *out;          /* [T, H, M]; may be x */
    int64_t num_tokens, num_heads, width;
    int64_t x_stride_t, x_stride_h, residual_stride_t, residual_stride_h, out_stride_t, out_stride_h;
    float eps;
} RmsNormArgs;

/* out[t, i] = act(x[t, i]) * x[t, width + i]. */
typedef struct ActMulArgs {
    OctavoContext *ctx;
    const float *x; /* [T, 2 width] */
    float *out;     /* [T, width] */
    int64_t num_tokens, width, x_stride_t, out_stride_t;
    int32_t gate;   /* OctavoGate */
} ActMulArgs;

/* Rotates the first rotary_dim elements of each head and copies the rest. Output may be the input. */
typedef struct RotaryArgs {
    OctavoContext *ctx;
    const float *q, *k;     /* [T, H, D], [T, K, D] */
    float *out_q, *out_k;
    const int64_t *positions; /* [T], each in [0, num_positions) or the call returns OCTAVO_EINVAL */
    const float *cos_sin;     /* [P, rotary_dim]: cosines, then sines */
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, num_positions;
    int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h;
    int64_t out_q_stride_t, out_q_stride_h, out_k_stride_t, out_k_stride_h;
    int64_t cos_sin_stride;
    int32_t interleaved;
} RotaryArgs;

/* Stores k and v, divided by their scales and rounded to nearest even, at slots of the cache; slot -1 writes nothing. With q, rotates q into out_q and
 * k on its way to the cache. A slot past the cache, or a position past the table, returns OCTAVO_EINVAL and writes nothing. */
typedef struct WriteKvArgs {
    OctavoContext *ctx;
    const float *k, *v;       /* [T, K, D], [T, K, Dv] */
    void *key, *value;        /* [N, S, K, D], [N, S, K, Dv] of kv_dtype; any stride between a key's elements */
    const int64_t *slots;     /* [T] */
    const float *k_scale, *v_scale; /* one for all heads (step 0) or each; or NULL */
    const float *q;           /* [T, H, D], or NULL and so the other three */
    float *out_q;             /* may be q */
    const int64_t *positions; /* [T] */
    const float *cos_sin;     /* [P, rotary_dim] */
    int64_t num_tokens, num_kv_heads, head_dim, v_head_dim, num_blocks, block_size;
    int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
    int64_t key_stride_n, key_stride_s, key_stride_h, key_stride_d, value_stride_n, value_stride_s, value_stride_h;
    int64_t k_scale_step, v_scale_step;
    int64_t num_heads, rotary_dim, num_positions;
    int64_t q_stride_t, q_stride_h, out_q_stride_t, out_q_stride_h, cos_sin_stride;
    int32_t kv_dtype;         /* OctavoDtype */
    int32_t interleaved;
} WriteKvArgs;

/* How blocks move. */
typedef enum OctavoBlockMove {
    OCTAVO_BLOCKS_COPY = 0,   /* ids holds pairs (source, destination), taken in order; buffers unused */
    OCTAVO_BLOCKS_GATHER = 1, /* block ids[i] to row i of the buffers */
    OCTAVO_BLOCKS_SCATTER = 2 /* row i of the buffers to block ids[i] */
} OctavoBlockMove;

/* Moves whole blocks within a cache, or between it and contiguous buffers [n, S, K, D] and [n, S, K, Dv] of its dtype.
 * An id outside the cache returns OCTAVO_EINVAL and moves nothing. */
typedef struct MoveBlocksArgs {
    OctavoContext *ctx;
    void *key, *value;               /* [N, S, K, D], [N, S, K, Dv]; any stride between a key's elements */
    void *key_buffer, *value_buffer; /* NULL for COPY */
    const int64_t *ids;              /* [n], or [n, 2] for COPY */
    int64_t num_moves, num_blocks, block_size, num_kv_heads, head_dim, v_head_dim, element_bytes; /* 1, 2 or 4 */
    int64_t key_stride_n, key_stride_s, key_stride_h, key_stride_d, value_stride_n, value_stride_s, value_stride_h;
    int32_t move;                    /* OctavoBlockMove */
} MoveBlocksArgs;

#define OCTAVO_ELEMENTWISE_KERNELS(X) \
    X(rms_norm, RmsNormArgs) X(act_mul, ActMulArgs) X(rotary, RotaryArgs) X(write_kv, WriteKvArgs) \
    X(move_blocks, MoveBlocksArgs)

#endif
