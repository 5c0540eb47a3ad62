"""Widgets: each takes one frozen value and draws it."""
