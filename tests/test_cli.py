"""The command `opensora`, in a clone and from a wheel."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from opensora import __version__, cli
from opensora.utils.folders import REPOSITORY


@pytest.fixture
def opensora(monkeypatch, capsys):
    """`opensora("--help")` runs it in this process -> exit code, what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opensora", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        try:
            code = cli.main() or 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_version_and_help(opensora):
    assert opensora("--version") == (0, f"opensora {__version__}\n", "")
    code, printed, _ = opensora()
    assert (code, printed) == opensora("--help")[:2]
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("  ")] == [*cli.COMMANDS, "run"]


def test_nothing_heavy_is_imported_for_them():
    code = "import sys, opensora.cli; sys.exit(bool({'torch', 'numpy', 'mmengine'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=REPOSITORY).returncode == 0


def test_a_misspelt_name_gets_the_nearest(opensora):
    code, printed, message = opensora("trian")
    assert (code, printed) == (2, "")
    assert "no command 'trian'. Did you mean 'train'?" in message
    code, _, message = opensora("run", "tools.convrt")
    assert code == 2
    assert "no program 'tools.convrt'; `opensora run` lists them. Did you mean 'tools.convert'?" in message


def test_every_command_is_a_program(opensora):
    programs = opensora("run")[1].splitlines()
    assert {program for program, _ in cli.COMMANDS.values()} <= {*programs}
    assert {"scripts.train_vae", "tools.convert", "tools.quickstart"} <= {*programs}


def test_a_command_gets_its_arguments_and_is_called_by_its_name(opensora):
    code, printed, _ = opensora("doctor", "--help")
    assert code == 0
    assert "What a training run will make of its data" in printed
    assert sys.argv == ["opensora doctor", "--help"]
    for program in ("tools.estimate", "tools/estimate.py"):
        code, printed, _ = opensora("run", program, "--help")
        assert code == 0
        assert printed.startswith("usage: opensora run tools.estimate ")


def test_the_help_of_a_script_does_not_wait_for_torch():
    code = "import sys; from opensora import cli; sys.argv[1:] = ['sample', '--help']; cli.main()"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.startswith("usage: opensora sample CONFIG ")
    assert done.stdout.endswith("\nFalse\n")


IN_A_WHEEL = """
import os, sys
from opensora import cli
os.chdir(sys.argv[1])
for arguments in (["--version"], ["sample", "configs/quickstart/inference.py", "--print-config"]):
    sys.argv = ["opensora", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
import tools
print(tools.__file__)
"""


@pytest.mark.slow
def test_a_wheel_runs_in_an_empty_folder(tmp_path, repo_root):
    """Built from an sdist, as for PyPI; unpacked as pip does it."""
    source, out, site, empty = (tmp_path / name for name in ("source", "out", "site", "empty"))
    empty.mkdir()
    source.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "build", "vae-video-small", "wan-quickstart")
    for path in repo_root.glob("[!.]*"):
        if path.name in ("opensora", "scripts", "tools", "configs", "assets"):
            shutil.copytree(path, source / path.name, ignore=left_out)
        elif path.is_file():
            shutil.copy(path, source)
    build(source, "sdist", out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / f"opensora-{__version__}", "wheel", out)
    wheel = next(out.glob("*.whl"))
    assert wheel.stat().st_size < 30e6
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir()} == {"opensora", f"opensora-{__version__}.dist-info"}
    inside = site / "opensora" / "_repository"
    for kind in ("configs/**/*.py", "scripts/**/*.py", "tools/**/*.py", "assets/clips/*.mp4", "assets/texts/*"):
        assert {p.relative_to(inside) for p in inside.glob(kind)} == {p.relative_to(source) for p in source.glob(kind)}
    assert (site / "opensora" / "py.typed").is_file()
    entry_points = (site / f"opensora-{__version__}.dist-info" / "entry_points.txt").read_text()
    assert "opensora = opensora.cli:main" in entry_points

    done = subprocess.run(
        [sys.executable, "-c", IN_A_WHEEL, str(empty)],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"opensora {__version__}\n")
    assert f"model.from_pretrained = '{inside / 'assets/models/stdit-quickstart'}'" in done.stdout
    assert f"{inside / 'assets/texts/quickstart.txt'}" in done.stdout
    assert done.stdout.splitlines()[-1] == str(inside / "tools" / "__init__.py")
    assert [*empty.iterdir()] == []


def build(source: Path, kind: str, out: Path) -> None:
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
