"""Triton kernels written for CDNA3."""
