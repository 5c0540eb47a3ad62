"""`python -m workbench` is `apr-workbench`."""

import sys

from apr_workbench import workbench

sys.exit(workbench())
