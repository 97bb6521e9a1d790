"""Triton kernels on the CPU: a file run as a script, in a process in which Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path


def interpreted(script: Path) -> str:
    """What `script` prints; it must end well."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
