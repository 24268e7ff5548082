"""Triton kernels and pieces of kernels that read the same on every GPU."""

import os

# A product followed by a sum becomes one instruction where the compiler sees both. Triton 3.9 does so by default and
# 3.10 will not: said aloud, kernels come out the same from both.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
