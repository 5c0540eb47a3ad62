"""Incidents that users meet, made to happen on purpose, for `engine drill`: wrong files, hangs, kills, full memory. No
other part of the engine imports this package."""
