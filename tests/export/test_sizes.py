"""A file refuses images that are no whole number of patches."""

import pytest

from vilonghorn.export import formats, runtime
from vilonghorn.ops.backends import cpu

REASONS = {
    "onnx": "images_must_be_whole_patches.*Input shape:.2,3,{},{}., requested shape:.2,3,{},{}.",
    "ort": "images_must_be_whole_patches.*Input shape:.2,3,{},{}., requested shape:.2,3,{},{}.",
    "pt2": r"Guard failed: .*x.size\(\)\[\d\]\) % \d == 0",
}


@pytest.mark.parametrize(
    "kind, name, stride",
    [
        ("onnx", "vilonghorn_nano", 4),
        ("ort", "vilonghorn_nano", 8),
        ("pt2", "vilonghorn_nano", 4),
        ("pt2", "vilonghornv2_nano", 4),
    ],
)
def test_a_size_that_would_be_cropped_is_refused_and_no_other(kind, name, stride, small, images, tmp_path):
    if kind == "ort" and cpu.library is None:
        pytest.skip("the native library is not built")
    form, model = formats.FORMATS[kind], small(name, depth=1, stride=stride)
    path = tmp_path / f"model{form.suffix}"
    form.write(formats.capture(model, form.native), path, formats.describe(model))
    run = runtime.load(kind, str(path), *formats.libraries(kind))
    fits, over = 8 + 3 * stride, 8 + 3 * stride + 1
    for height, width in ((fits, over), (over, fits)):
        sizes = height, width, *(fits + stride if side == over else fits for side in (height, width))
        with pytest.raises(Exception, match=f"(?s){REASONS[kind].format(*sizes)}"):
            run(images(2, 3, height, width))
    for batch in (1, 2):
        assert run(images(batch, 3, fits, fits)).shape == (batch, 5)
