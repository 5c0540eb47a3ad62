"""Screens: they poll a feed in a thread, hand its snapshots down to widgets, and act on keys."""
