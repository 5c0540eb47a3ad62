"""Checkpoints: written whole or refused by name, kept, deleted, restored."""
