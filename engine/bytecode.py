"""Where Python keeps the compiled modules of torch, without which each start compiles 2,000 of them again.

Images of containers often have none: they were installed with `--no-compile`, and PYTHONDONTWRITEBYTECODE or a folder
that is not writable keeps Python from adding them. That costs a start 4 s for torch and 4 s for torch's compiler
(H100 host). Our processes then keep them in the user's cache. What `engine watch` starts is not ours: it is left alone.
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
    """Let this process keep compiled modules in the user's cache, if torch has none and Python would write none."""
    torch = importlib.util.find_spec("torch")
    if sys.pycache_prefix is not None or torch is None or torch.origin is None:
        return
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    folder = compiled.parent if compiled.parent.exists() else compiled.parent.parent
    if not compiled.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK)):
        sys.pycache_prefix, sys.dont_write_bytecode = str(user_cache("bytecode")), False


def with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process that is started finds compiled modules where this one keeps them."""
    if sys.pycache_prefix is None or sys.dont_write_bytecode:
        return dict(environment)
    without = {name: value for name, value in environment.items() if name != DONT_WRITE}
    return {**without, PREFIX: sys.pycache_prefix}
