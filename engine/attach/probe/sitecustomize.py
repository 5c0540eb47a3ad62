"""Start the probe in every Python process under `engine watch`, then run the user's own sitecustomize.

Python imports this file before the user's modules, because its folder is the first in PYTHONPATH.
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
# The import below must find the user's own sitecustomize, or fail as without the probe: site.py ignores a missing
# module, and prints an exception that the module raises.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
finally:
    # As the last entry, it shadows no other module.
    sys.path.append(_HERE)
