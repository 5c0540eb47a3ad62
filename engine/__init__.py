"""The engine: distils language models, and observes any training."""

from engine import child

# Before the import of any module that a user's file of the same name could replace.
child.begin()
