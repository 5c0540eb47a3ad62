"""The run log: the only link between an engine and what looks at it. Loads without torch."""
