"""Versions of installed packages."""

from __future__ import annotations


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    # Imported here: it takes 5 % of the time to the workbench's first frame, which needs no version.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
