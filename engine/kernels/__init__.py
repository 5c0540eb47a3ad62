"""Triton kernels and what compiles and launches them, and attention by cuDNN.

This is the only package that imports triton. Tests compare each kernel with a slow reference.
"""
