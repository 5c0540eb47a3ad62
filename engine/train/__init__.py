"""Distillation: the objective, the step, checkpoints, and `run.py`, the one place that puts a
run together.
"""
