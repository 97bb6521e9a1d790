"""Mutation testing: whether the tests notice a wire that is cut. `python -m tests.mutants [--only NAME] [-j N]`.

Each mutant of `mutants.py` is applied to a copy of the working tree, where its tests must then fail. They run in forks of this process,
which has imported what they need: that takes longer than most of them.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.conftest import PRELOADED, ROOT  # the import also keeps this process off the network, and to one thread
from tests.mutants.mutants import MUTANTS, Mutant, misplaced

KILL_RATE = 0.95
TIMEOUT_S = 300
LINKED = ("assets", "docs")  # large, and not mutated
IMPORTS = ("diffusers.models", "transformers.models.bert", "torch.utils.tensorboard", "pandas", "timm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", choices=[mutant.name for mutant in MUTANTS], help="one mutant alone")
    parser.add_argument("-j", metavar="N", type=int, default=1, help="processes")
    args = parser.parse_args()
    if wrong := misplaced(ROOT):
        sys.exit("\n".join(wrong))
    mutants = [mutant for mutant in MUTANTS if args.only in (None, mutant.name)]
    for name in (*PRELOADED, *IMPORTS):
        if not name.startswith("opensora"):
            importlib.import_module(name)
    begin, trees = time.monotonic(), SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(args.j) as pool:
        first = copy_tree(Path(folder, "0"))
        code, output = run_tests(first, {test for mutant in mutants for test in mutant.tests}, timeout_s=3600)
        if code != 0:
            sys.exit(f"the tests fail without a mutant:\n{output}")
        for i in range(args.j):  # the copies have the bytecode that this run has left
            trees.put(shutil.copytree(first, Path(folder, str(i)), symlinks=True) if i else first)
        outcomes = list(pool.map(lambda mutant: outcome_of(mutant, trees), mutants))
    print("| mutant | what it breaks | outcome |\n|---|---|---|")
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        print(f"| `{mutant.name}` | {mutant.breaks} | {outcome} |")
    killed = sum(outcome.startswith("killed") for outcome in outcomes)
    seconds = time.monotonic() - begin
    print(f"\n{killed} of {len(mutants)} mutants are killed, {killed / len(mutants):.1%}, in {seconds:.0f} s.")
    return int(killed < KILL_RATE * len(mutants) or any(outcome.startswith("error") for outcome in outcomes))


def copy_tree(tree: Path) -> Path:
    """The files that git tracks or would add."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file() and Path(name).parts[0] not in LINKED:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for name in LINKED:
        (tree / name).symlink_to(ROOT / name)
    return tree


def outcome_of(mutant: Mutant, trees: "SimpleQueue[Path]") -> str:
    """Apply, test, restore: with the file's time, so that its bytecode is that of the original again."""
    tree, original = trees.get(), ROOT / mutant.file
    try:
        (tree / mutant.file).write_text(original.read_text().replace(mutant.old, mutant.new))
        code, output = run_tests(tree, mutant.tests, TIMEOUT_S)
    finally:
        shutil.copy2(original, tree / mutant.file)
        trees.put(tree)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    if code == 1 and failed:
        outcome = f"killed by `{failed[1]}`"
    else:
        outcome = {0: "survived", None: "timeout"}.get(code, f"error: pytest's exit code is {code}")
    print(f"{mutant.name}: {outcome}", file=sys.stderr, flush=True)
    return outcome


def run_tests(tree: Path, tests: Iterable[str], timeout_s: float) -> tuple[int | None, str]:
    """pytest's exit code, None where it took too long, and what it printed."""
    output = tree / "output.txt"
    if (pid := os.fork()) == 0:
        os.setsid()
        sys.stdout = sys.stderr = output.open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        os.chdir(tree)
        sys.path[0] = str(tree)  # where `python -m` has put ROOT
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # they are ROOT's
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp", *sorted(tests)]))
    end = time.monotonic() + timeout_s
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return None, ""
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1]), output.read_text()


if __name__ == "__main__":
    sys.exit(main())
