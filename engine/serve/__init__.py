"""Serve run folders live to a browser, from a server on 127.0.0.1 that only reads."""
