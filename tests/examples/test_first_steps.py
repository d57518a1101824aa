"""The notebook of the first steps runs from top to bottom."""

import json
import re
from pathlib import Path

from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_and_its_model_learns(capsys):
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text.count("image/png") == 2  # of the run that was committed
    names: dict = {}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("EPOCHS, BATCH, LR = 4", "EPOCHS, BATCH, LR = 2")  # for speed
            exec(compile(source, NOTEBOOK.name, "exec"), names)
    assert len(plt.get_fignums()) == 2
    plt.close("all")
    accuracies = [float(percent) for percent in re.findall(r"test accuracy ([\d.]+)%", capsys.readouterr().out)]
    assert len(accuracies) == 2 and accuracies[-1] > 80
