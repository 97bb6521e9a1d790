"""Open-Sora's name of a command: see scripts/open_sora.py."""

import runpy

runpy.run_path(__file__.rpartition("tools/")[0] + "scripts/open_sora.py", {"CALLED": __file__}, __name__)
