"""The workbench in a notebook: `from workbench.notebook import Live, Flip, Whys, Compare`.

Live, Flip and Whys return at once and show a widget. Its content comes from run folders through the same feeds as the
terminal's, polled in a thread of its own, so the kernel stays free and nothing here touches a GPU. Compare reads its
runs once and shows a figure that does not change. No port is opened: pages get comm messages and nothing else.
`close()` ends the thread and the comms; the run, or the flip, continues.
"""

from __future__ import annotations

import importlib.util

from engine.version import install_extra

_MISSING = [n for n in ("anywidget", "ipywidgets") if importlib.util.find_spec(n) is None]
if _MISSING:
    raise ImportError(
        f"workbench.notebook — expected {' and '.join(_MISSING)}, found none: "
        f"{install_extra('notebook')}"
    )

from workbench.notebook.compare import Compare  # noqa: E402
from workbench.notebook.flip import Flip  # noqa: E402
from workbench.notebook.frames import frame  # noqa: E402
from workbench.notebook.live import Live  # noqa: E402
from workbench.notebook.whys import Whys  # noqa: E402

__all__ = ["Compare", "Flip", "Live", "Whys", "frame"]
