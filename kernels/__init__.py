"""Triton kernels: none yet."""
