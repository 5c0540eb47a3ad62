"""Triton kernels. This is the only package that imports triton; each file has a slow reference that
its output must equal.
"""
