"""A hash of the documents of a split, for tests that compare whole splits."""

from __future__ import annotations

import hashlib

from engine.data.corpus import Split
from tests.support.streams import documents_of


def digest_of(split: Split) -> str:
    """Return the SHA-256 of the names and texts in order, with their lengths."""
    digest = hashlib.sha256()
    for document in documents_of(split):
        for text in (document.name.encode("utf-8"), document.text.encode("utf-8")):
            # The length keeps "ab" + "c" and "a" + "bc" apart.
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
    return digest.hexdigest()
