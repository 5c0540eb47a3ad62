"""Start the engine's child processes, and control what Python imports in them.

Python puts the folder of `python -m`, and the entries of PYTHONPATH, first in `sys.path`: an `engine.py` there
hides this package, and a `token.py` replaces the standard library's. The engine's processes therefore start with
`-P`, and with PYTHONPATH renamed:

    command("engine.watch", RUN)    python -P -m engine.watch RUN
    environment()                   return the environment for that command: PYTHONPATH is renamed
    begin()                         in the child, before any other import: set PYTHONPATH again, for users' scripts
                                    that the child starts, and append its entries to `sys.path`. Python has not read
                                    them at its start, so no `sitecustomize` in them has run
    ours_first()                    set the same order in a process that a user starts, such as `engine` in a shell
"""

from __future__ import annotations

import os
import site
import sys

# Python imports the modules above before it reads any path; `collections` would be imported from `sys.path`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PYTHONPATH = "PYTHONPATH"
ASIDE = "APR_WORKBENCH_PYTHONPATH"
"""Environment variable of a child with the user's PYTHONPATH, as `=` and its value; empty if PYTHONPATH is not
set."""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that this package is imported from."""
TRACEBACKS = ("-X", "faulthandler", "-u")
"""Options of Python for a process whose last output must not be lost: unbuffered, with the stacks of a crash."""
_STDLIB = os.path.dirname(os.__file__)
_STDLIB_NAMES = (f"python{sys.version_info[0]}{sys.version_info[1]}.zip", "lib-dynload")


def command(module: str, *arguments: str, options: Iterable[str] = ()) -> list[str]:
    """Return the command `python -m MODULE ARGUMENTS` of a child, to be started in `environment()`; `options` are
    Python's own. `-I` would lose the packages of `pip install --user`, and a script's path puts its folder first."""
    return [sys.executable, "-P", *options, "-m", module, *arguments]


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `base`, or the environment of this process, for a child that is started by `command`."""
    variables = dict(os.environ if base is None else base)
    user_path = variables.pop(PYTHONPATH, None)
    variables[ASIDE] = "" if user_path is None else f"={user_path}"
    if not _is_in(_site_folders()):
        # A checkout, or a folder of `pip install --target`: Python finds the package in no other way.
        variables[PYTHONPATH] = ROOT
    return variables


def begin() -> None:
    """Set the import order in a process that was started in `environment()`; do nothing in any other process."""
    user_path = os.environ.pop(ASIDE, None)
    if user_path is None:
        return
    os.environ.pop(PYTHONPATH, None)
    if user_path:
        os.environ[PYTHONPATH] = user_path[1:]
    _order(user_path[1:].split(os.pathsep) if user_path[1:] else ())


def ours_first() -> None:
    """Set the import order in a process that a user has started: `python -m engine`, or a script of the package."""
    if not sys.flags.safe_path and sys.path[:1] in ([""], [_folder()]):
        # The folder of `python -m`, which the installed scripts do not have either.
        del sys.path[0]
    _order(())


def path() -> list[str]:
    """Return `sys.path` of this process, which may be a user's script, with the engine's folders first."""
    return _ordered(())


def _order(last: Iterable[str]) -> None:
    sys.path[:] = _ordered(last)


def _ordered(last: Iterable[str]) -> list[str]:
    """Return the entries of `sys.path` in this order: the standard library, this package, the folders that `site` has
    added, the entries that Python or a user has put before the standard library, and the entries `last` of a
    PYTHONPATH."""
    is_stdlib = [entry == _STDLIB or os.path.basename(entry) in _STDLIB_NAMES for entry in sys.path]
    begin = is_stdlib.index(True) if any(is_stdlib) else 0
    stdlib = [entry for entry, is_one in zip(sys.path, is_stdlib, strict=True) if is_one]
    rest = [e for e, is_one in zip(sys.path[begin:], is_stdlib[begin:], strict=True) if not is_one]
    ours = [] if _is_in(rest) else [ROOT]
    behind = map(_absolute, [*sys.path[:begin], *last])
    return list(dict.fromkeys([*stdlib, *ours, *rest, *behind]))


def _site_folders() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


def _is_in(folders: Iterable[str]) -> bool:
    return os.path.realpath(ROOT) in map(os.path.realpath, folders)


def _absolute(entry: str) -> str:
    """Return an entry of PYTHONPATH as an absolute path, as Python does: an empty entry is the current folder."""
    folder = _folder()
    return entry if folder is None else os.path.normpath(os.path.join(folder, entry))


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # removed
