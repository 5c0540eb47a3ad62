"""The package's version; everything reads it from here."""

VERSION = "0.1.0"
