"""What is decided about a run before a weight is loaded: settings with automatic choices, and memory."""
