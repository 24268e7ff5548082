/* Arguments of the sampling kernel. Part of octavo_cpu.h; include that. */
#ifndef OCTAVO_SAMPLE_H
#define OCTAVO_SAMPLE_H

/* One token per row: x = (logit - max) / temperature; keep x >= the floors of top-k, top-p and min-p, ties kept; then the
 * first id at which the running sum of e^x exceeds uniform times its total. -1 for a row without a finite maximum. */
typedef struct SampleArgs {
    OctavoContext *ctx;
    const float *logits;      /* [R, V] */
    const float *temperature; /* [R]; 0 or less takes the lowest id of the maximum */
    const int64_t *top_k;     /* [R]; 0 or less, or V and more, keeps all */
    const float *top_p;       /* [R]; 1 and more keeps all; of the mass that top-k leaves */
    const float *min_p;       /* [R]; relative to the most likely token; 0 and less keeps all */
    const float *uniform;     /* [R] in [0, 1) */
    int64_t *out;             /* [R] */
    int64_t num_rows, vocab_size, logits_stride;
} SampleArgs;

#define OCTAVO_SAMPLE_KERNELS(X) X(sample, SampleArgs)

#endif
