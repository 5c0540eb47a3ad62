"""`python -m workbench` is `apr-workbench`."""

import sys

from workbench.cli import main

sys.exit(main())
