"""Every op of the contract in plain torch, on any torch device: the semantics, and the fallback.

    ops.py        ReferenceOps: the Ops protocol over the functions below
    weight.py     PlainWeight: a weight kept as it came
    product.py    gemm, grouped_gemm              lora.py      lora_gemm
    rows.py       embed, rms_norm, layer_norm, rotary, act_mul, activation, all_reduce_norm
    cache.py      write_kv, rope_write_kv, copy / gather / scatter of blocks
    attention.py  paged_attention, attention, merge_attention
    mla.py        write_mla, mla_attention        moe.py       moe_route, moe_permute, moe_combine
    quantize.py   quantize

Written to be read. Everything is accumulated in fp32, or in fp64 when an input is fp64, so that the same code
serves as the tests' oracle. It may allocate and synchronise, which an own kernel must not.
"""
