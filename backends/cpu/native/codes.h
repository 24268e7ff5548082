/* Quantised weights as the kernels read them. Part of octavo_cpu.h; include that.
 *
 *     W[n, k] = code[n, k] * scale[n, k / group] + added[n, k / group]      one fused multiply-add in fp32
 *
 * Panels and gated halves are those of gemm.h; within a panel codes lie as one of OctavoCodeFormat says:
 *
 *     I8          [k][lane]            one signed byte a code
 *     I4, U4      [k / 8][lane]        32 bits hold eight codes: byte b has k + b in its low half, k + 4 + b in its high one;
 *                                      two's complement (I4: -8 .. 7) or from 0 on (U4: 0 .. 15)
 *
 * Scales and what is added lie as [panel][group][lane], in fp32, in fp16 where the file has fp16, or in two levels where the
 * file has two (GGUF's K types): a byte per group times an fp16 unit per `unit` codes, [panel][unit][lane]. Products of the
 * two are exact in fp32. Lanes past N, and codes past K in the last eight, hold zeros.
 */
#ifndef OCTAVO_CODES_H
#define OCTAVO_CODES_H

typedef enum OctavoCodeFormat { /* beside OctavoDtype in w_dtype */
    OCTAVO_CODES_I8 = 16,
    OCTAVO_CODES_I4 = 17,
    OCTAVO_CODES_U4 = 18
} OctavoCodeFormat;

typedef enum OctavoScaleType { OCTAVO_SCALE_F32 = 0, OCTAVO_SCALE_F16 = 1, OCTAVO_SCALE_UNITS = 2 } OctavoScaleType;

/* What `w` of GemmArgs and EmbedArgs points to when w_dtype is an OctavoCodeFormat. */
typedef struct OctavoCodes {
    int64_t struct_bytes;        /* sizeof(OctavoCodes): a caller with another layout is refused */
    const uint8_t *codes;
    const void *scales;
    const void *added;           /* of the same type as scales; NULL: nothing is added. Always for U4, never for I4 */
    const uint16_t *unit_scales; /* fp16; with OCTAVO_SCALE_UNITS only */
    const uint16_t *unit_added;
    int64_t panel_bytes;         /* from one panel's codes to the next */
    int64_t group, unit;         /* codes along K that share a scale, a unit; multiples of 8, or one for all of K */
    int64_t groups, units;       /* of a panel */
    int32_t format;              /* OctavoCodeFormat */
    int32_t scale_type;          /* OctavoScaleType */
} OctavoCodes;

/* Places rows of codes [n, k] into a packed weight, as PackArgs does with numbers. */
typedef struct PackCodesArgs {
    OctavoContext *ctx;
    const OctavoCodes *w;
    const uint8_t *src;  /* [n, k] a code a byte, rows src_stride apart; of 4 bits the low half counts */
    int64_t n, k;
    int64_t src_stride;
    int64_t n_offset;
    int64_t panel_first, panel_step;
} PackCodesArgs;

#define OCTAVO_CODES_KERNELS(X) X(pack_codes, PackCodesArgs)

#endif
