"""Watching training scripts that are not ours: the probe that runs inside them, and the command that starts them."""
