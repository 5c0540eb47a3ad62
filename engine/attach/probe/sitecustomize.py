"""Start the probe in every Python process under `engine watch`, then run the user's own sitecustomize.

Python imports this file before the user's modules, because its folder leads PYTHONPATH.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    run = os.environ.get("APR_WATCH_RUN")
    if run:
        try:
            import apr_watch

            apr_watch.follow(run)
        except Exception:  # noqa: BLE001  a probe that fails must never fail the user's process
            pass


_start()
# The import below has to find the user's module, or to fail as it would without us: site.py passes over a missing
# sitecustomize, and prints what an existing one raises.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
finally:
    # Last, where it can shadow nothing.
    sys.path.append(_HERE)
