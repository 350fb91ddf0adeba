"""The command ``python -m areal.tests.mutants``."""

import sys

from areal.tests.mutants.run import main

sys.exit(main())
