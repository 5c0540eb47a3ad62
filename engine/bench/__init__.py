"""Measured comparisons that `engine bench` prints: every arm in one run, beside the roofline."""
