"""Make F32/F16/BF16/Q8_0/Q4_0 GGUFs from the Q4_1 GGUF, with llama.cpp's own quantizer.

Run with the llama.cpp venv:  vl/bin/python make_ggufs.py SRC.gguf OUT_DIR
Quality does not matter here (weights come from Q4_1 either way): only size and speed do.
"""

import os
import sys

import llama_cpp as lc

FTYPES = {
    "F32": lc.LLAMA_FTYPE_ALL_F32,
    "F16": lc.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": lc.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": lc.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": lc.LLAMA_FTYPE_MOSTLY_Q4_0,
}

src, out = sys.argv[1:3]
os.makedirs(out, exist_ok=True)
lc.llama_backend_init()
for name, ftype in FTYPES.items():
    dst = os.path.join(out, f"smollm2-{name}.gguf")
    if os.path.exists(dst):
        continue
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, 2, True
    rc = lc.llama_model_quantize(src.encode(), dst.encode(), params)
    print(name, rc, os.path.getsize(dst) if rc == 0 else "failed")
