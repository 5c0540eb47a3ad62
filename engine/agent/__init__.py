"""Serve runs to agents: a server of the Model Context Protocol (`server.py`), and a skill file that explains its
use."""
