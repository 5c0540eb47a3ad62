"""`python -m engine`: the same as the `engine` command."""

import sys

from apr_workbench import engine

sys.exit(engine())
