"""The tables of docs/export.md say what was measured."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("export_tables", ROOT / "docs" / "export" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_the_page_is_made_from_the_json_files():
    page = (ROOT / make.PAGE).read_text(encoding="utf-8")
    assert make.filled(page, ROOT / make.FOLDER) == page, "run python docs/export/make.py"


def test_ratios_are_medians_of_the_rounds():
    times = {"eager": [10.0, 30.0, 20.0], "ort": [5.0, 30.0, 10.0], make.DEIT: [20.0, 30.0, 20.0]}
    cell = dict(side=224, batch=8, threads=2)
    rows = [
        dict(candidate=name, **cell, ms=times.get(name, times["eager"])) for name in ("eager", *make.FILES, make.DEIT)
    ]
    report = json.loads((ROOT / make.FOLDER / "speed.json").read_text()) | dict(rows=rows)
    assert "| 224 | 8 | 2 | 20.0 | 0.50 | 1.00 | 1.00 | 1.00 | 0.50 |" in make.speed_tables(report)
