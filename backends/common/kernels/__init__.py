"""Triton kernels and pieces of kernels that read the same on every GPU."""
