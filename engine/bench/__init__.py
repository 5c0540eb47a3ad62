"""Benchmarks for `engine bench`: every arm measured in one run, beside the roofline."""
