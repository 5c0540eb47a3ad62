"""The installed commands. Python puts the entries of PYTHONPATH in front of what is installed, and many of them hold an
`engine.py`: this name is nobody else's, and from here on ours come first."""

import os
import sys


def engine() -> int:
    """Run `engine`; return its exit code."""
    return _run("engine", "engine.cli.main")


def workbench() -> int:
    """Run `apr-workbench`; return its exit code."""
    return _run("apr-workbench", "workbench.cli")


def _run(name: str, module: str) -> int:
    _ours_first()
    from importlib import import_module

    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        # A part of the installation is missing, such as after an upgrade of half of it.
        from engine.crash import explain

        return explain(name, error)
    return int(main())


def _ours_first() -> None:
    root = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, root)
    try:
        from engine import child
    finally:
        sys.path.remove(root)
    child.ours_first()
