"""One lock for all threads that build syntax trees of Python source.

CPython before 3.11.8 and 3.12.2 keeps one recursion counter for building syntax trees in all threads. If a
garbage collection lets a second thread parse, the first fails with "SystemError: AST constructor recursion
depth mismatch". Code that may run in several threads holds `PARSING` around `ast.parse`, and around calls
of libraries that parse.
"""

from __future__ import annotations

import threading

PARSING = threading.RLock()
