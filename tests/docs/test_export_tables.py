"""The tables of docs/export.md say what was measured."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("export_tables", ROOT / "docs" / "export" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_the_page_is_made_from_the_json_files():
    page = (ROOT / make.PAGE).read_text(encoding="utf-8")
    assert make.filled(page, ROOT / make.FOLDER) == page, "run python docs/export/make.py"
