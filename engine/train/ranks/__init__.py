"""Training on several GPUs: one process per GPU."""
