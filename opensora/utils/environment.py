"""How a run or a sample was made: command, commit and versions."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """The command, the commit and the versions in use."""
    packages = ("opensora", "torch", "diffusers", "transformers", "numpy")
    return {
        "command": sys.argv,
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command as typed, or with other `arguments`, for a shell: working folder, script, torchrun if it was started so."""
    env = os.environ
    program, *arguments = sys.argv if arguments is None else arguments
    words, launcher = [program], ["python"]
    if program.startswith("opensora "):  # opensora/cli.py
        words, launcher = program.split(" "), []
    if "TORCHELASTIC_RUN_ID" in env:
        nodes = int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
        where = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes)]
        module = [] if launcher else ["-m"]
        launcher = ["torchrun", *where, "--nproc_per_node", env["LOCAL_WORLD_SIZE"], *module]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([*launcher, *words, *arguments])}"


def git_commit() -> str | None:
    """The commit of this source tree, with `-dirty` when files differ from it; None outside a repository."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None


def git_changes() -> str:
    """The differences of this source tree from its commit, for `git apply`; empty without any, or outside a repository."""
    return _git("diff", "HEAD", "--binary", "--no-ext-diff", "--no-color")


def _git(*arguments: str) -> str:
    """The output of a git command in this source tree; empty where there is no git, or no repository that has this file."""
    try:
        for words in (
            ["ls-files", "--error-unmatch", Path(__file__).name],
            arguments,
        ):  # not a repository around a virtualenv
            done = subprocess.run(
                ["git", *words],
                cwd=Path(__file__).parent,
                capture_output=True,
                text=True,
                check=False,
                errors="replace",
            )
            if done.returncode:
                return ""
    except FileNotFoundError:
        return ""
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
