"""The messages that docs/faq.md quotes are in the source of the library, or come from timm and torch."""

import ast
import re
from pathlib import Path

import pytest
import timm
import torch

import vilonghorn  # noqa: F401  (registers the models)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
QUOTES = [quote for line in re.findall("^### (.*)", PAGE, re.MULTILINE) for quote in re.findall('"(.*?)"', line)]


def model():
    return timm.create_model("vilonghorn_nano", depth=1)


OTHERS = {  # what provokes a message of timm or torch
    "Unknown model (vilonghorn_tiny)": lambda: timm.create_model("vilonghorn_tiny_"),
    "size mismatch": lambda: model().load_state_dict(timm.create_model("vilonghorn_nano", embed_dim=32).state_dict()),
    "Missing key(s) in state_dict": lambda: model().load_state_dict({}),
    "Input width (3) doesn't match model (224)": lambda: model()(torch.zeros(2, 224, 224, 3)),
    "Input height (256) doesn't match model (224)": lambda: model()(torch.zeros(1, 3, 256, 256)),
    "Input type (unsigned char) and bias type (float) should be the same": lambda: model()(
        torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    ),
    "Input type (double) and bias type (float) should be the same": lambda: model()(
        torch.zeros(1, 3, 224, 224, dtype=torch.float64)
    ),
}


@pytest.fixture(scope="module")
def texts():
    """The strings of the source, those that are written in parts joined."""
    nodes = [node for file in (ROOT / "vilonghorn").rglob("*.py") for node in ast.walk(ast.parse(file.read_bytes()))]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("quote", QUOTES)
def test_the_page_quotes_what_is_printed(quote, texts):
    if quote in OTHERS:
        with pytest.raises(Exception, match=re.escape(quote.rstrip(")"))):
            OTHERS[quote]()
        return
    for part in filter(None, re.split(r"\.\.\.|; | is ", quote)):
        assert any(part.strip() in text for text in texts), part


def test_the_page_quotes_many_messages():
    assert len(QUOTES) > 20 and OTHERS.keys() <= set(QUOTES)
