"""Define the package's version, and tell which of its two distributions are installed."""

from pathlib import Path

VERSION = "0.1.0"


def has_engine() -> bool:
    """Return whether the engine is installed, and not only `apr-workbench-view`, which has everything that needs no
    torch."""
    return Path(__file__).with_name("train").joinpath("trainer.py").is_file()


def install_extra(extra: str) -> str:
    """Return the command that adds the packages of an extra to the distribution that is installed."""
    return f"pip install 'apr-workbench{'' if has_engine() else '-view'}[{extra}]'"
