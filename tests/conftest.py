"""What every test may count on, however pytest was started.

The commands of this tree's own environment come first, what a playbook says can be followed through a pipe, and hosts
that share this machine may take their time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONUNBUFFERED"] = "1"
os.environ.setdefault("ANSIBLE_TIMEOUT", "60")  # seconds for a connection, and for sudo, on a busy machine
