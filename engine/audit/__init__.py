"""Audit a training step: compare each stage of one real step of the trainer with plain reference code."""
