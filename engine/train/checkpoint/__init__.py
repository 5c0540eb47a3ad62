"""Checkpoints of a run: saving, verification, retention and restoring."""
