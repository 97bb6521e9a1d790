"""Open-Sora's name of a command: see scripts/open_sora.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "open_sora.py"), {"CALLED": __file__}, __name__)
