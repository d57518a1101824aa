"""The messages that docs/faq.md quotes are in the source of the library, but for those of timm and torch."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
QUOTES = {quote for line in re.findall("^### (.*)", PAGE, re.MULTILINE) for quote in re.findall('"(.*?)"', line)}
OF_OTHERS = (
    "Unknown model",
    "size mismatch",
    "Missing key(s) in state_dict",
    "Input width",
    "Input height",
    "Input type",
)


def test_the_page_quotes_what_is_printed():
    nodes = [node for file in (ROOT / "vilonghorn").rglob("*.py") for node in ast.walk(ast.parse(file.read_bytes()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    ours = [quote for quote in QUOTES if not quote.startswith(OF_OTHERS)]
    parts = [part.strip() for quote in ours for part in re.split(r"\.\.\.|; | is ", quote) if part]
    assert len(ours) > 15 and [part for part in parts if not any(part in text for text in texts)] == []
