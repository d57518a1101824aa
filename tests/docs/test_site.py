"""The pages: links lead somewhere, and the reference is complete. `make docs` builds the site."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
READMES = [ROOT / folder / "README.md" for folder in ("studies", "benchmarks", "examples")]


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_files_that_contributing_names_exist():
    named = re.findall(r"`([\w./]+\.(?:py|h|cuh|cpp|cu))`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    folders = ("vilonghorn", "kernels", "tests", "benchmarks", "studies", "examples")
    found = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")}
    found |= {path.name for path in ROOT.glob("*.py")}
    missing = [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in found)]
    assert named and [name for name in missing if "NAME" not in name] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|\]\([^)]*\)|https?://\S+", "", text, flags=re.DOTALL)
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 600
    assert len(re.findall(r"\d+(?:[.,-]\d+)*", prose)) <= 25
