"""Python runs this at its start where tests/site is on PYTHONPATH: see tests/faults.py."""

import os
import sys
from pathlib import Path

if "FAULT" in os.environ:
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import faults

    faults.install()
    sys.path.pop()
