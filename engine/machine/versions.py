"""Versions of installed packages."""

from __future__ import annotations


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    # Takes a twentieth of the time until the workbench shows its first frame, which needs no version.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
