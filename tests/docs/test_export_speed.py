"""The tables of docs/export.md say what was measured."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("export_speed", ROOT / "docs" / "export" / "speed.py")
speed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(speed)


def report(slow: str) -> dict:
    """Files take 1.0 of the eager model's time in the median round, and `slow` 3 times that with two threads."""
    rows = [
        dict(candidate=name, side=side, batch=batch, threads=threads, clock=clock)
        | dict(ms=[ms * (3 if (name, threads) == (slow, 2) else 1) for ms in (10.0, 30.0, 20.0)])
        for name in ("eager", *speed.FILES, speed.PEER)
        for side in (224, 512)
        for batch in (1, 8)
        for threads in (1, 2)
        for clock in speed.CLOCKS
    ]
    figures = {name: 0.1 for name in (*speed.FILES, speed.PEER)}
    made = dict(command="a command", date="2026-01-01T00:00:00", machine="a machine", rounds=3)
    return made | dict(load_seconds=figures, megabytes=figures, rows=rows)


@pytest.mark.parametrize(("slow", "missed"), [("nothing", []), ("ort", [0, 3, 4]), ("onnx", [1]), ("aoti", [2])])
def test_a_target_is_missed_if_one_size_is_too_slow(slow, missed):
    lines = speed.verdicts(report(slow))
    assert [i for i, line in enumerate(lines) if "NOT MET" in line["verdict"]] == missed
    assert all(line["largest ratio"] == "3.00" for i, line in enumerate(lines) if i in missed)


def test_the_page_is_made_from_the_json_file():
    page = (ROOT / speed.PAGE).read_text(encoding="utf-8")
    assert speed.fill(page, json.loads((ROOT / speed.JSON).read_text(encoding="utf-8"))) == page


def test_a_slow_load_is_missed_and_a_page_without_markers_refused():
    made = report("nothing")
    made["load_seconds"]["ort"] = 0.3
    assert "NOT MET" in speed.verdicts(made)[-1]["verdict"]
    assert "| 224 | 8 | 2 | 20.0 | 1.00 / 1.00 |" in speed.fill("<!-- speed -->\n<!-- end of speed -->", made)
    with pytest.raises(ValueError, match="lacks the lines"):
        speed.fill("a page", made)
