"""One lock for everything that makes syntax trees of Python source in a thread.

CPython before 3.11.8 and 3.12.2 counts the depth of a tree that it makes for all threads together: where a
garbage collection lets a second thread parse, the first fails with "SystemError: AST constructor
recursion depth mismatch". A thread that may not be alone takes `PARSING` around `ast.parse`, or around a
call of a library that parses.
"""

from __future__ import annotations

import threading

PARSING = threading.RLock()
