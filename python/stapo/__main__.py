"""`python -m stapo`: the program `stapo`."""

import sys

from ._command import main

sys.exit(main())
