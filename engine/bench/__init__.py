"""Benchmarks for `engine bench`: every arm measured in one run and compared with the roofline."""
