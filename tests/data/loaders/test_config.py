"""Options of a loader are checked with a message that names them."""

import pytest

from vilonghorn.data import create_loader

TRAIN = {"batch_size": 4, "image_size": 16, "training": True, "seed": 3, "workers": 1}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, r"^batch_size is 0; it must lie in \[1, inf\)$"),
        ({"batch_size": 28}, "27 images do not fill a batch of 28: lower batch_size"),
        ({"workers": -1}, "workers is -1; it must lie in"),
        ({"std": (1, 0, 1)}, r"std is \(1, 0, 1\); it must lie in \(0, inf\)"),
        ({"mean": (0.5, 0.5)}, r"^mean is \(0.5, 0.5\); expected 3 numbers$"),
        ({"ramp": (1, 2, 3)}, r"^ramp is \(1, 2, 3\); expected 2 numbers$"),
        ({"image_size": (3, 16, 16)}, r"^image_size is \(3, 16, 16\); expected 2 numbers$"),
        ({"image_size": (0, 16)}, r"image_size is \(0, 16\); it must lie in"),
        ({"image_size": (16, 24), "sizes": [8]}, r"sizes is \[8\], for square images, but image_size is \[16, 24\]"),
        ({"image_size": (16, 24), "start_size": 8, "ramp": (0, 2)}, "start_size is 8, for square images"),
        ({"rank": 2, "world_size": 2}, "rank is 2; expected 0 to world_size - 1, which is 1"),
        ({"ratio": (2, 1)}, "ratio is .*; give the smaller bound first"),
        ({"rank": 1, "world_size": 7}, "do not fill a batch of 4 on each of 7 ranks"),
        ({"auto_augment": "rand-m9-x"}, "auto_augment 'rand-m9-x': 'x' has no number.*; give a policy of timm such as"),
        ({"auto_augment": "rand-tweights"}, "weights of operations are not supported"),
        ({"auto_augment": "rand-n99"}, "auto_augment .*: expected 1 to 12 operations in a row"),
        ({"interpolation": "lanczos"}, "interpolation is 'lanczos'; expected area or bicubic"),
        ({"start_size": 17}, "start_size is 17, above the image size, which is 16"),
        ({"start_size": 8, "ramp": (5, 2)}, r"ramp is \[5, 2\]; give the smaller bound first"),
        ({"sizes": [8, 17]}, r"sizes is \[8, 17\], above the image size, which is 16"),
        ({"sizes": [0, 8]}, r"sizes is \[0, 8\]; it must lie in"),
        ({"sizes": [8], "start_size": 8, "ramp": (1, 2)}, r"sizes is \[8\] and start_size is 8: give one"),
        ({"start_size": 8}, r"start_size is 8 but ramp is \[0, 0\]"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(folder, options, named):
    with pytest.raises(ValueError, match=named):
        create_loader(folder, **{**TRAIN, **options})
    with pytest.raises(TypeError, match="hflap"):
        create_loader(folder, **TRAIN, hflap=0.5)


@pytest.mark.parametrize(("processes", "decoding", "reading"), [(None, 24, 8), (2, 12, 8), (4, 6, 6), (32, 1, 1)])
def test_the_processes_of_a_machine_share_its_cpus(folder, jpg_beton, monkeypatch, processes, decoding, reading):
    monkeypatch.setattr("vilonghorn.data.loaders.available_cpus", lambda: 24)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    options = {**TRAIN, "workers": None}
    assert create_loader(jpg_beton, **options).config.workers == decoding
    assert create_loader(folder, **options).config.workers == reading
