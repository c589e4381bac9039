"""``python -m ruda_optim``, and the console command ``ruda-optim``: see :mod:`ruda_optim.cli`."""

from __future__ import annotations

import sys

from .cli import main as main

if __name__ == "__main__":
    sys.exit(main())
