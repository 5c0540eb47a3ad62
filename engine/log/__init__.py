"""The run log: the only link between an engine and the tools that watch it. Loads without torch."""
