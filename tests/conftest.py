"""What every test may count on, however pytest was started.

The commands of this tree's own environment come first, and what a playbook says can be followed through a pipe.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONUNBUFFERED"] = "1"
