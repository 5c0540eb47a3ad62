"""One training process for each of several GPUs."""
