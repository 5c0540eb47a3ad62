"""The screens. They poll a feed in a thread, pass its snapshots to widgets, and act on keys."""
