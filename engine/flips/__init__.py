"""Experiments on runs: two arms that differ in one setting, and what may be concluded from them."""
