"""The installed commands. Python puts the entries of PYTHONPATH in front of what is installed, and many of them hold an
`engine.py`: this name is nobody else's, and from here on ours come first."""

import os
import sys


def engine() -> int:
    """Run `engine`; return its exit code."""
    _ours_first()
    from engine.cli.main import main

    return main()


def workbench() -> int:
    """Run `apr-workbench`; return its exit code."""
    _ours_first()
    from workbench.cli import main

    return main()


def _ours_first() -> None:
    root = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, root)
    try:
        from engine import child
    finally:
        sys.path.remove(root)
    child.ours_first()
