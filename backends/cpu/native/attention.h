/* Arguments of the attention family. Part of octavo_cpu.h; include that.
 *
 * Key p of request b lies in block block_table[b, p / block_size] at slot p % block_size, or, with kv_start instead of a
 * block table, in row kv_start[b] + p of one long block. Query i of a request with n queries and L keys stands at
 * position L - n + i (bottom-right).
 */
#ifndef OCTAVO_ATTENTION_H
#define OCTAVO_ATTENTION_H

/* out = softmax(scale q k^T, capped, biased, masked) v over each request's own keys. Keys are taken in tiles of 64 and
 * splits of 512 at absolute positions, each query row on its own: its bits depend on its row and on its keys up to where it
 * sees them, not on the batch, on how the queries were cut into calls, or on the number of threads. Keys that no row of a
 * call may see are not read. */
typedef struct PagedAttentionArgs {
    OctavoContext *ctx;
    const float *q;              /* [T, H, D], or [T, H, D - tail_dim] with q_tail */
    const float *q_tail;         /* [T, H, tail_dim], the last elements of each query; or NULL */
    const void *k, *v;           /* [N, S, K, D], [N, S, K, Dv] of kv_dtype; keys in rows (k_stride_d 1) or in lanes */
    float *out;                  /* [T, H, Dv] */
    float *lse;                  /* [T, H], natural log, sinks included, or NULL */
    const float *sinks;          /* [H] or NULL */
    const float *alibi_slopes;   /* [H] or NULL */
    const float *k_scale, *v_scale; /* what a stored element stands for, one for all heads (step 0) or each; or NULL */
    const int32_t *query_start;  /* [B + 1], rows of q */
    const int32_t *seq_lens;     /* [B], keys of a request; NULL with kv_start */
    const int32_t *block_table;  /* [B, table_width]; NULL with kv_start */
    const int32_t *kv_start;     /* [B + 1], rows of contiguous k and v, or NULL */
    int64_t num_requests, table_width, table_stride, block_size;
    int64_t num_heads, num_kv_heads, head_dim, v_head_dim;
    int64_t q_stride_t, q_stride_h;
    int64_t tail_dim, tail_stride_t, tail_stride_h;
    int64_t out_stride_t, out_stride_h;
    int64_t lse_stride_t;
    int64_t k_stride_n, k_stride_s, k_stride_h, k_stride_d; /* in lanes: k_stride_s 1, block_size a multiple of 16 */
    int64_t v_stride_n, v_stride_s, v_stride_h;
    int64_t k_scale_step, v_scale_step;
    int64_t window;              /* tokens, the query's own included; 0 is none */
    float softmax_scale;
    float softcap;               /* 0 is none */
    int32_t kv_dtype;            /* OctavoDtype */
    int32_t causal;
} PagedAttentionArgs;

/* out = the attention over two disjoint sets of keys, from each set's own result; a part of lse -inf adds nothing. */
typedef struct MergeAttentionArgs {
    OctavoContext *ctx;
    const float *a, *lse_a, *b, *lse_b; /* [T, H, D] and [T, H] */
    float *out;                         /* [T, H, D]; may be a or b */
    float *lse;                         /* [T, H] or NULL; may be lse_a or lse_b */
    int64_t num_tokens, num_heads, head_dim;
    int64_t a_stride_t, a_stride_h, b_stride_t, b_stride_h, out_stride_t, out_stride_h;
    int64_t lse_a_stride_t, lse_b_stride_t, lse_stride_t;
} MergeAttentionArgs;

#define OCTAVO_ATTENTION_KERNELS(X) X(paged_attention, PagedAttentionArgs) X(merge_attention, MergeAttentionArgs)

#endif
