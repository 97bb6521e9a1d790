"""The project agrees with itself: requirements, README, docs, changelog and code."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import opensora

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODULES = sorted(module.name for module in pkgutil.walk_packages(opensora.__path__, "opensora."))

# A path of somebody's machine. Written so that this line does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:home|root|work|Users|mnt)/\w")
# A note of work to do carries the number of its issue in brackets.
LOOSE_TODO = re.compile(r"\bTO" r"DO\b(?!\(#\d+\))")


@cache
def project_files() -> tuple[Path, ...]:
    """The files git tracks or would add; every file but the obvious where there is no git."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        skip = {".venv", ".git", "outputs", "samples", "data", "build", "__pycache__"}
        files = [path for path in ROOT.rglob("*") if not skip & set(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in files if path.is_file()))


def text_files() -> Iterator[tuple[Path, str]]:
    for path in project_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            yield path, data.decode()


def readme() -> str:
    return (ROOT / "README.md").read_text()


def find(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_requirements_are_the_core_dependencies():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in lines if line and not line.startswith("#")] == core


WITHOUT_EXTRAS = """
import sys
from importlib.metadata import packages_distributions
for module, names in packages_distributions().items():
    if not {name.lower() for name in names} - set(sys.argv[1].split()):
        sys.modules[module] = None  # importing it is a ModuleNotFoundError
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_every_test_module_is_collected_where_only_the_core_and_pytest_are_installed():
    """A module that imports an extra at its top would let `make test` fail for whoever ran README's command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: set(map(distribution, of)) for name, of in project["optional-dependencies"].items()}
    tools = extras["dev"] - set().union(*(of for name, of in extras.items() if name != "dev"))
    missing = set().union(*extras.values()) - tools - set(map(distribution, project["dependencies"]))
    assert {"peft", "torchao", "scenedetect"} <= missing
    assert "pytest" in tools
    command = [sys.executable, "-c", WITHOUT_EXTRAS, " ".join(missing)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower()


def test_no_test_module_imports_from_another():
    """What several share is in a file of its own: a module that cannot be collected would take others along."""
    found = find(re.compile(r"^\s*(?:from|import) tests\.[\w.]*\btest_\w+"))
    assert found == []


def test_the_oldest_versions_are_those_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = [project["dependencies"], *project["optional-dependencies"].values()]
    lowest = {re.match(r"([\w.-]+)>=([\d.]+)", each).groups() for some in allowed for each in some if ">=" in each}
    pinned = [line for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines() if not line.startswith("#")]
    assert {tuple(line.split("==")) for line in pinned} == lowest


PYTHON_STUB = """#!/bin/sh
case "$*" in
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*urlopen*) exit "$NO_ANSWER" ;;
*" install "*) echo "${*#*--disable-pip-version-check }" >> installed ;;
esac
"""
CPU = "--index-url https://download.pytorch.org/whl/cpu torch torchvision"


@pytest.fixture
def make(tmp_path):
    """`make(targets and variables)` with a stand-in for Python -> what it had pip install; with or without an answer of PyTorch's server."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python, installed = tmp_path / "python", tmp_path / "installed"
    python.write_text(PYTHON_STUB)
    python.chmod(0o755)

    def run(*words: str, answer: bool = False) -> list[str]:
        installed.write_text("")
        environment = {**os.environ, "NO_ANSWER": str(int(not answer)), "MAKEFLAGS": ""}
        command = ["make", "-s", f"PYTHON={python}", *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        return installed.read_text().splitlines()

    return run


def test_a_user_gets_no_tools_of_developers_and_nothing_is_installed_twice(make):
    assert make("setup", "NVIDIA_SMI=yes", answer=True) == ["-e .[quickstart]"]
    assert make("setup") == []
    assert make("setup-dev", answer=True) == ["-e .[dev,docs,quickstart]"]
    assert make("setup", "setup-dev") == []
    assert make("-B", "setup", "EXTRAS=demo,quickstart") == ["-e .[demo,quickstart]"]


def test_developers_tools_come_in_one_go(make):
    assert make("setup-dev") == ["-e .[dev,docs,quickstart]"]
    assert make("setup") == []


@pytest.mark.parametrize(
    ("words", "answer", "expected"),
    [
        (["setup", "NVIDIA_SMI="], True, [CPU, "-e .[quickstart]"]),
        (["setup", "NVIDIA_SMI="], False, ["-e .[quickstart]"]),
        (["setup", "NVIDIA_SMI=", "TORCH=default"], True, ["-e .[quickstart]"]),
        (["setup", "NVIDIA_SMI=yes", "TORCH=cpu"], False, [CPU, "-e .[quickstart]"]),
        (["setup-dev", "TORCH=cu128"], False, [CPU.replace("cpu", "cu128"), "-e .[dev,docs,quickstart]"]),
    ],
)
def test_which_pytorch(make, words, answer, expected):
    assert make(*words, answer=answer) == expected


def test_make_targets_named_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    command = re.compile(r"(?:`|^ *(?:- run: )?)make ([a-z-]+)", re.MULTILINE)
    named = {name for page in pages for name in command.findall(page.read_text())}
    assert {"quickstart", "test"} <= named
    assert named <= targets


def test_files_named_in_the_readme_exist():
    named = re.findall(r"(?:scripts|configs|tools|assets)/[\w./-]+\.(?:py|csv|txt|png)", readme())
    assert named
    assert [name for name in sorted(set(named)) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_and_says_what_it_is(name):
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):  # an __init__ that only marks a package needs no words
        assert module.__doc__, f"{name} has no docstring"


def test_programs_tools_and_configs_open_with_a_docstring():
    bare = [
        path.relative_to(ROOT)
        for path, text in text_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in {"scripts", "tools", "configs", "assets"}
        if path.name != "__init__.py" and not re.match(r'(#!.*\n)?r?"""', text)
    ]
    assert bare == []


def test_no_file_names_a_machine_of_ours():
    assert find(MACHINE_PATH) == []


def test_every_note_of_work_to_do_has_an_issue_number():
    assert find(LOOSE_TODO) == []


def test_architecture_stays_short():
    assert len((DOCS / "architecture.md").read_text().splitlines()) <= 150


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in links(page)
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_is_linked():
    linked = {
        (page.parent / target).resolve()
        for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
        for target in links(page)
        if (page.parent / target).resolve() != page.resolve()
    }
    assert [page.relative_to(ROOT) for page in sorted(DOCS.rglob("*.md")) if page.resolve() not in linked] == []


def links(page: Path) -> list[str]:
    """The files of the project that a page links to, anchors cut off."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def test_changelog_has_a_place_for_the_next_change():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_forms_and_workflows_are_yaml_and_run_what_ci_runs():
    found = {
        path.name: (path.read_text(), yaml.safe_load(path.read_text())) for path in (ROOT / ".github").rglob("*.yml")
    }
    assert {"ci.yml", "bug.yml", "feature.yml"} <= found.keys()
    text, workflow = found["ci.yml"]
    assert {"run": ".ci/run"} in workflow["jobs"]["checks"]["steps"]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in re.findall(r"uses: (\S+)", text))


def test_the_version_is_the_same_everywhere():
    newest = re.findall(r"^## \[(\d[\d.]*)\] - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = (ROOT / "CITATION.cff").read_text()
    assert newest == tuple(re.search(rf"^{key}: (.*)$", cited, re.MULTILINE)[1] for key in ("version", "date-released"))
    assert newest[0] == opensora.__version__
