"""A teacher read from stored outputs."""
