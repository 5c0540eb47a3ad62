"""Executable contracts: promises of the code, read strictly from YAML and checked by running tests and
proofs."""
