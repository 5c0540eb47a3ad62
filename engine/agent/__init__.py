"""Runs for agents: a server of the Model Context Protocol (`server.py`), and a skill that says how to use it."""
