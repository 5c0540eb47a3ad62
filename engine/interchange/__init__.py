"""Runs of other tools as run folders, and runs of ours as files of other tools: `engine import`, `engine export`."""
