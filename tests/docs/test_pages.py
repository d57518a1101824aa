"""The pages are prose: short, in short sentences, and without figures of their own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "api")
MAX_LINES, MAX_WORDS = 150, 35
VERSION = r"(?:torch|Triton|Apache|SA|version|capability|arXiv) [\d.]*\d"
# The pages of results: their tables are filled from JSON (studies/pages.py, benchmarks/pages.py).
RESULTS = [*DOCS.glob("comparison/*.md"), *DOCS.glob("performance/*.md")]
RESULTS += [DOCS / "comparison.md", DOCS / "performance.md", DOCS / "models/icons480.md", DOCS / "models/lite0.md"]


def prose(text: str) -> list[str]:
    """The paragraphs and items of lists of a page, as read: without code blocks, tables, headings and addresses."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|\n\s*(?=- |\d+\. )", text)
    return [" ".join(part.split()).removeprefix("- ") for part in parts if part.strip()]


def sentences(text: str) -> list[str]:
    """The sentences of a page; code within a sentence is one word."""
    parts = (re.sub(r"`[^`]*`", "code", part) for part in prose(text))
    return [sentence for part in parts for sentence in re.split(r"(?<=[.!?:])[)*\"]*\s+", part)]


def test_a_sentence_is_read_without_code_tables_and_addresses():
    page = "# Title\n\nOne `a b c` and [two](x.md).\nThree:\n\n| a b | c |\n\n- four, 1.5 times\n  five\n- six\n"
    page += "\n```\nseven\n```\n"
    assert sentences(page) == ["One code and two.", "Three:", "four, 1.5 times five", "six"]


def test_docs_has_prose_and_pictures_only():
    kinds = {path.suffix for path in DOCS.rglob("*") if path.is_file()}
    assert kinds <= {".md", ".svg", ".png", ".css", ".ipynb"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_short_and_so_are_its_sentences(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert [sentence for sentence in sentences(text) if len(sentence.split()) > MAX_WORDS] == []


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_figure_in_a_sentence_stands_in_a_table_that_is_filled_from_json(page):
    text = page.read_text(encoding="utf-8")
    tables = "".join(re.findall(r"<!-- [\w ]+ -->\n(.*?)<!-- end of", text, re.DOTALL))
    said = re.findall(r"\d+\.\d+", re.sub(rf"`[^`]*`|{VERSION}", "", " ".join(prose(text))))
    known = re.findall(r"\d+\.\d+", tables)
    assert [figure for figure in said if figure not in known] == []
