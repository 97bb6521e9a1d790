"""The pages of the documentation: links with their anchors, pages that the code names, the navigation of the site, length."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "configs/README.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = {"docs/config.md"}  # by tools/gen_config_docs.py: as long as there are fields
LONGEST = 250


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; the site's are the same."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-") for heading in headings
    }


def test_anchors_lead_to_headings():
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*\.md|)#([^)]+)\)", page.read_text(encoding="utf-8")):
            to = (page.parent / target).resolve() if target else page
            if to.exists() and anchor not in anchors(to):  # files that are not there: tests/test_project.py
                broken.append(f"{page.relative_to(ROOT)} -> {target}#{anchor}")
    assert broken == []


def test_pages_that_code_and_configs_name_exist():
    command = ["git", "-c", "safe.directory=*", "grep", "-Ino", r"docs/[a-zA-Z0-9_/-]*\.md", "--", ":!CHANGELOG.md"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git")
    assert len(found) > 50
    named = {line.rpartition(":")[2]: line for line in found}
    assert [where for name, where in named.items() if not (ROOT / name).exists()] == []


def test_no_page_is_too_long():
    lengths = {str(page.relative_to(ROOT)): len(page.read_text().splitlines()) for page in PAGES}
    assert {page: n for page, n in lengths.items() if n > LONGEST and page not in GENERATED | {"CHANGELOG.md"}} == {}


def test_the_site_lists_every_page_once():
    """A page that is not in the navigation is not found; mkdocs only mentions it."""
    named = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(named) == sorted(pages)
