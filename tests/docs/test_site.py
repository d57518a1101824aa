"""The pages of the site: links lead somewhere, the reference is complete, and the site builds without a warning."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/api/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_opens_with_its_title_and_a_summary(page):
    title, blank, summary, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and blank == "" and re.match(r"\w|`\w", summary)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/api/*.md")), ids=lambda page: page.stem)
def test_the_reference_has_what_the_package_offers(page):
    package = importlib.import_module(f"vilonghorn.{page.stem}")
    listed = dict(name.rpartition(".")[::-2] for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    for name, module in listed.items():
        assert hasattr(importlib.import_module(module), name)
    tree = Path(package.__file__).read_text(encoding="utf-8")
    imported = re.findall(r"\w+", " ".join(re.findall(r"^from \.\S+ import \(?([\w,\s]+?)\)?$", tree, re.MULTILINE)))
    offered = set(imported) if hasattr(package, "__path__") else set()  # a module imports for itself
    assert listed and offered <= listed.keys()


def test_the_reference_has_what_the_pages_use():
    reference = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    imports = re.findall(r"^from (vilonghorn\S*) import ([\w, ]+)$", text, re.MULTILINE)
    used = {(module, name) for module, names in imports for name in names.split(", ")}
    used |= {(module, name) for module, name in re.findall(r"(vilonghorn[\w.]*)\.(\w+)\(", text)}
    used = {name for module, name in used if callable(getattr(importlib.import_module(module), name))}
    assert {"load", "scan", "Block"} <= used and used <= listed | {"load_model"}  # load_model is load


@pytest.fixture
def build(tmp_path):
    """Builds the site of a checkout into tmp_path / "site"."""
    pytest.importorskip("mkdocs", reason="pip install --group docs")

    def run(root):
        command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
        environment = {**os.environ, "REPO_URL": "https://example.org/code"}
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)

    return run


def test_the_site_builds_and_its_links_lead_to_pages_or_to_the_repository(build, tmp_path):
    assert (found := build(ROOT)).returncode == 0, found.stderr
    html = {
        page: (tmp_path / "site" / page / "index.html").read_text()
        for page in ("", "performance", "api/ops", "first_steps")
    }
    assert 'src="performance/speed.svg"' in html[""] and 'href="choosing/"' in html[""]
    assert 'href="https://example.org/code/blob/HEAD/vilonghorn/layers"' in html[""]
    assert 'href="https://example.org/code/blob/HEAD/docs/performance/cpu-1.json"' in html["performance"]
    assert 'href="first_steps/"' in html[""] and 'href="../photos/"' in html["first_steps"]
    assert html["first_steps"].count('src="data:image/png') == 2
    assert 'id="vilonghorn.ops.scan.scan"' in html["api/ops"] and "state-space recurrence" in html["api/ops"]


LINKS = "[a page](nowhere.md) [code](../vilonghorn/nowhere.py) [a section](models.md#nowhere)"
REFERENCE = "::: vilonghorn.ops.nowhere"


@pytest.mark.parametrize(
    "line, said",
    [(LINKS, ["nowhere.md", "nowhere.py", "#nowhere"]), (REFERENCE, ["vilonghorn.ops.nowhere could not be found"])],
)
def test_a_broken_link_or_reference_stops_the_build(line, said, build, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs" / "site", copy / "docs" / "site")
    config = (ROOT / "mkdocs.yml").read_text()
    (copy / "mkdocs.yml").write_text(re.sub(r"nav:.*?\n\n", "", config, flags=re.DOTALL))
    (copy / "README.md").write_text("# A README\n")
    (copy / "docs" / "models.md").write_text(f"# Models\n\n{line}\n")
    (copy / "vilonghorn").symlink_to(ROOT / "vilonghorn")
    found = build(copy)
    assert found.returncode != 0 and all(part in found.stderr for part in said), found.stderr
