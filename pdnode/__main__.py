"""`python -m pdnode` is the command line."""

import sys

from pdnode.cli import main

sys.exit(main())
