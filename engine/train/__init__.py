"""Distillation: the training step, checkpoints, and `run.py`, the composition root of a run."""
