/* Arguments of the GEMM family. Part of octavo_cpu.h; include that.
 *
 * The packed weight: panels of 16 output columns, each K rows of 16 contiguous values.
 *
 *     W[n, k]  ->  packed[panel][k][lane]      plain: panel = n / 16,          lane = n % 16
 *                                              gated: gate n at panel 2 (n / 16), up n at panel 2 (n / 16) + 1
 *
 * so one vector of 16 lanes is one (panel, k), a column tile streams contiguous memory, and in a gated weight a tile of
 * two panels holds both halves of the same 16 outputs. Lanes past N hold zeros.
 */
#ifndef OCTAVO_GEMM_H
#define OCTAVO_GEMM_H

#define OCTAVO_PANEL 16

typedef enum OctavoActivation {
    OCTAVO_ACT_NONE = 0,
    OCTAVO_ACT_SILU_MUL = 1,     /* silu(gate) * up */
    OCTAVO_ACT_GELU_TANH_MUL = 2 /* gelu(gate, tanh form) * up */
} OctavoActivation;

/* Places rows of a row-major [n, k] matrix into a packed weight; other lanes of the destination stay as they are, so a
 * fused weight (q, k, v; gate, up) is packed part by part into one zeroed buffer. */
typedef struct PackArgs {
    OctavoContext *ctx;
    const void *src;    /* [n, k] of src_dtype, rows src_stride elements apart */
    void *dst;          /* packed, of dst_dtype */
    int64_t n, k;       /* rows to place; length of each */
    int64_t src_stride;
    int64_t n_offset;   /* column of the packed weight (of its half, if gated) where row 0 goes */
    int64_t panel_first; /* plain 0; gated: gate 0, up 1 */
    int64_t panel_step;  /* plain 1; gated 2 */
    int32_t src_dtype;  /* OctavoDtype, any */
    int32_t dst_dtype;  /* OCTAVO_F32 or OCTAVO_BF16 (rounded to nearest even) */
} PackArgs;

/* out = act(x W^T + bias) + residual. Each output element is one chain of fused multiply-adds along k = 0..K-1, then the
 * epilogue: its bits depend on its row, its column and nothing else (not on m, tiles, threads or instruction set). */
typedef struct GemmArgs {
    OctavoContext *ctx;
    const float *x;        /* [m, k] */
    const void *w;         /* packed weight; an OctavoCodes for one of codes */
    const float *bias;     /* [n] in unpacked order (gate first, then up), or NULL */
    const float *residual; /* [m, n_out], or NULL; may be `out` itself */
    float *out;            /* [m, n_out]; n_out = n, or n / 2 with a gated activation */
    int64_t m, n, k;       /* n: rows of the unpacked weight; gate and up counted both */
    int64_t x_stride, residual_stride, out_stride; /* row strides */
    int32_t w_dtype;       /* OCTAVO_F32, OCTAVO_BF16 or an OctavoCodeFormat (widened to fp32 in registers) */
    int32_t activation;    /* OctavoActivation; not NONE requires a gated weight */
} GemmArgs;

/* out[t, :] = scale * W[ids[t], :], from a plain packed weight, so that a tied embedding is stored once. */
typedef struct EmbedArgs {
    OctavoContext *ctx;
    const int64_t *ids;  /* [num_tokens], each in [0, n) or the call returns OCTAVO_EINVAL */
    const void *w;       /* packed weight, not gated; an OctavoCodes for one of codes */
    float *out;          /* [num_tokens, k] */
    int64_t num_tokens, n, k;
    int64_t out_stride;
    float scale;
    int32_t w_dtype;     /* OCTAVO_F32, OCTAVO_BF16 or an OctavoCodeFormat */
} EmbedArgs;

#define OCTAVO_GEMM_KERNELS(X) X(pack, PackArgs) X(gemm, GemmArgs) X(embed, EmbedArgs)

#endif
