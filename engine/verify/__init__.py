"""Verify a run: replay it in a fresh process and compare the record step by step (`engine verify`)."""
