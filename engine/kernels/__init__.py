"""Triton kernels. The only package that imports triton; each file has a slow oracle it must equal."""
