"""The engine: distils language models, and observes any training."""

from engine import child

# Before any module that a file of the user's could replace.
child.begin()
