"""Contracts that run: what is promised of the code, read strictly from YAML, and proved by running it."""
