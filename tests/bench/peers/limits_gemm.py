"""GEMM ceilings in torch for SmolLM2's shapes: fp32, bf16, fp16, int8 and int4 paths, 2 threads.

The weights are cycled through enough copies to leave the cache (as a whole model does in decode).
Prints one JSON line per (path, shape, M) with microseconds, GFLOP/s and weight GB/s.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(2)
torch.manual_seed(0)
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
MS = (1, 8, 32, 128)
torch.set_grad_enabled(False)


def timed(fn, weights, budget=0.12):
    for w in weights:
        fn(w)
    best, _n_all, t_all = 1e9, 0, time.perf_counter()
    while time.perf_counter() - t_all < budget:
        t = time.perf_counter()
        for w in weights:
            fn(w)
        best = min(best, (time.perf_counter() - t) / len(weights))
    return best


def say(path, shape, m, n, k, sec, wbytes):
    print(
        json.dumps(
            {
                "path": path,
                "shape": shape,
                "M": m,
                "N": n,
                "K": k,
                "us": round(sec * 1e6, 1),
                "gflops": round(2 * m * n * k / sec / 1e9, 1),
                "weight_GBps": round(wbytes / sec / 1e9, 2),
            }
        ),
        flush=True,
    )


def square():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        say(
            "F.linear " + str(dtype)[6:],
            "1024^3",
            1024,
            1024,
            1024,
            timed(lambda v: F.linear(x, v), [w], 0.5),
            w.nbytes,
        )


def paths(n, k, copies):
    f32 = [torch.randn(n, k) * 0.05 for _ in range(copies)]
    yield "fp32 F.linear", f32, lambda x: lambda w: F.linear(x, w), n * k * 4
    t32 = [w.t().contiguous() for w in f32]
    yield "fp32 x@Wt (K,N contiguous)", t32, lambda x: lambda w: torch.mm(x, w), n * k * 4
    del t32
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, 32) for w in f32]
        yield (
            "fp32 mkldnn prepacked",
            packed,
            lambda x: lambda w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
            n * k * 4,
        )
        del packed
    except Exception as e:
        print("# mkldnn prepacked:", str(e)[:100])
    try:
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(w, 32) for w in f32]
        pairs = list(zip(packed, f32, strict=False))
        yield (
            "fp32 mkl prepacked",
            pairs,
            lambda x: lambda p: torch.ops.mkl._mkl_linear(x, p[0], p[1], None, x.shape[0]),
            n * k * 4,
        )
        del packed, pairs
    except Exception as e:
        print("# mkl prepacked:", str(e)[:100])
    bf = [w.bfloat16() for w in f32]
    yield "bf16 F.linear", bf, lambda x: lambda w, y=x.bfloat16(): F.linear(y, w), n * k * 2
    del bf
    fp = [w.half() for w in f32]
    yield "fp16 F.linear", fp, lambda x: lambda w, y=x.half(): F.linear(y, w), n * k * 2
    del fp
    scale = torch.rand(n)
    i8 = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(copies)]
    for name, dt in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        s = scale.to(dt)
        yield (
            f"int8 _weight_int8pack_mm {name}",
            i8,
            lambda x, dt=dt, s=s: lambda w, y=x.to(dt): torch.ops.aten._weight_int8pack_mm(y, w, s),
            n * k,
        )
    i8t = [w.t() for w in i8]
    yield (
        "int8xint8 torch._int_mm",
        i8t,
        lambda x: lambda w, y=torch.randint(-127, 128, x.shape, dtype=torch.int8): torch._int_mm(y, w),
        n * k,
    )
    try:
        for engine in torch.backends.quantized.supported_engines:
            if engine not in ("fbgemm", "x86", "onednn", "qnnpack"):
                continue
            torch.backends.quantized.engine = engine
            mods = []
            for w in f32:
                q = torch.quantize_per_channel(w, scale * 0.01 + 1e-3, torch.zeros(n, dtype=torch.long), 0, torch.qint8)
                mods.append(torch.ops.quantized.linear_prepack(q, None))
            yield (
                f"int8 dynamic {engine}",
                mods,
                lambda x: lambda p: torch.ops.quantized.linear_dynamic(x, p, True),
                n * k,
            )
            del mods
    except Exception as e:
        print("# quantized dynamic:", str(e)[:120])
    del i8, i8t
    for g in (32, 64):
        if k % g:
            continue
        for name, dt in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            packed = [
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 1)
                for _ in range(copies)
            ]
            qsz = torch.rand(k // g, n, 2).to(dt)
            yield (
                f"int4 g{g} _weight_int4pack_mm_for_cpu {name}",
                packed,
                lambda x, g=g, q=qsz, dt=dt: (
                    lambda w, y=x.to(dt): torch.ops.aten._weight_int4pack_mm_for_cpu(y, w, g, q)
                ),
                n * k // 2 + n * k // g * 2 * qsz.element_size(),
            )
            del packed
    try:
        packed = []
        for w in f32:
            u = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            packed.append(torch.ops.aten._dyn_quant_pack_4bit_weight(u, torch.rand(n, 1), None, k, k, n))
        yield (
            "int4 dyn_quant_matmul_4bit",
            packed,
            lambda x: lambda w: torch.ops.aten._dyn_quant_matmul_4bit(x, w, k, k, n),
            n * k // 2,
        )
    except Exception as e:
        print("# dyn_quant 4bit:", str(e)[:100])


only = set(sys.argv[1:])  # path prefixes to keep; none means all
if not only:
    square()
for shape, (n, k) in SHAPES.items():
    copies = max(4, int(96e6 // (n * k)))  # 96 MB even at int8: three times the L3
    for name, weights, make, nbytes in paths(n, k, copies):
        if only and not any(name.startswith(o) for o in only):
            continue
        for m in MS:
            try:
                say(name, shape, m, n, k, timed(make(torch.randn(m, k)), weights), nbytes)
            except Exception as e:
                print("#", name, shape, m, str(e).split("\n")[0][:110], flush=True)
                break
