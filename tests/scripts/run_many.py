"""One process of several that runs scripts/train.py many times, so that starting Python is paid once.

RANK=0 WORLD_SIZE=2 ... python run_many.py '[[PORT, [ARGUMENT, ...]], ...]'
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for port, arguments in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv[1:] = arguments
        module.main()


if __name__ == "__main__":
    main()
