"""Keep the bytecode of torch's modules, without which each start compiles 2,000 modules again.

Container images often have no bytecode: torch was installed with `--no-compile`, and PYTHONDONTWRITEBYTECODE or a
folder that is not writable prevents Python from adding it. A start then takes 4 s longer for torch and 4 s for
torch's compiler (H100 host). The engine's processes then keep the bytecode in the user's cache. The commands that
`engine watch` starts are not changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.files import user_cache

PREFIX, DONT_WRITE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep_bytecode() -> None:
    """Let this process keep bytecode in the user's cache, if torch has none and Python would write none."""
    torch = importlib.util.find_spec("torch")
    if sys.pycache_prefix is not None or torch is None or torch.origin is None:
        return
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    folder = compiled.parent if compiled.parent.exists() else compiled.parent.parent
    if not compiled.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK)):
        sys.pycache_prefix, sys.dont_write_bytecode = str(user_cache("bytecode")), False


def with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with which a new process uses the same bytecode folder as this one."""
    if sys.pycache_prefix is None or sys.dont_write_bytecode:
        return dict(environment)
    without = {name: value for name, value in environment.items() if name != DONT_WRITE}
    return {**without, PREFIX: sys.pycache_prefix}
