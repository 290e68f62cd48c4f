"""`python -m kvframe` is `kvframe`."""

import sys

from kvframe.cli import main

sys.exit(main())
