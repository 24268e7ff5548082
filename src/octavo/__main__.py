"""`python -m octavo`: the command line of a tree that is not installed."""

import sys

from octavo.core.cli.main import main

sys.exit(main())
