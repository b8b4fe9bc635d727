#!/usr/bin/env python
"""The command line from a checkout, nothing installed but NumPy and click: ``scripts/quick_run.py run --causal``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupyflash.cli import main

if __name__ == "__main__":
    main(prog_name="quick_run.py")
