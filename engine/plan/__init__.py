"""Planning a run before any weight is loaded: automatic choices of settings, and the memory budget."""
