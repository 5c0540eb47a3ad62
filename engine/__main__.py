"""`python -m engine`: the same as the `engine` command."""

import sys

from engine.cli.main import main

sys.exit(main())
