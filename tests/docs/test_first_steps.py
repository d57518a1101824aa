"""The notebook of the first steps runs from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs_and_its_model_learns(monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install vilonghorn[test]")
    nbformat = pytest.importorskip("nbformat", reason="pip install vilonghorn[test]")
    pytest.importorskip("ipykernel", reason="pip install vilonghorn[test]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "first_steps.ipynb", as_version=4)
    assert str(notebook).count("image/png") == 2  # of the run that was committed
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    accuracies = [float(percent) for percent in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 4 and accuracies[-1] > 90
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
