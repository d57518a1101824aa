"""examples/quantize.py runs the recipes of the page, and no other code of it."""

from pathlib import Path


def test_the_recipes_are_those_of_quantization(script):
    page = Path(__file__).parents[2] / "docs/export/runtimes.md"
    code = script("examples/quantize").recipes(page.read_text(encoding="utf-8"))
    assert all(name in code for name in ("quantize_static(", "quantize_dynamic(", "nncf.quantize("))
    assert "openvino" not in code and "executorch" not in code
