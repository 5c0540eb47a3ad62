"""Experiments on runs: two arms that differ in one setting, and the conclusions that the pairs allow."""
