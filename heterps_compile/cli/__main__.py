"""``python -m heterps_compile.cli``: the ``heterps`` command without its script."""

import sys

from heterps_compile.cli import main

sys.exit(main())
