"""Triton kernels written for Hopper."""
