"""Time and peak memory of one large image, in eager PyTorch on a CPU: `python benchmarks/large_images.py [--most PX]`.

Memory is the peak of resident memory above that with an image of 64 px, without the larger image itself. Each model and
size has a process of its own. DeiT-Ti stops at 2048 px, where a pass takes as long as the others' at 4096 px. It writes
benchmarks/results/large_images.json and fills the table of docs/streams.md.
"""

import argparse
from functools import partial
from pathlib import Path

import timm
import torch
from interleaved import Steps, run_interleaved
from page_tables import markdown, write_page

import vilonghorn
from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine.environment import processor

MODELS = ("vilonghornv2_tiny", "mobilenetv4_conv_medium", "efficientvit_b1", "deit_tiny_patch16_224")
TILES = "vilonghornv2_tiny, forward_tiles"
SIZES = (1024, 2048, 4096, 8192)
RESULTS = Path(__file__).parent / "results" / "large_images.json"
SMALL = 64  # px, of the image whose memory is taken off


def make(name: str, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and one image."""
    name = name.partition(",")[0]
    options = dict(img_size=size) if name.startswith("deit") else {}
    return timm.create_model(name, **options).eval(), torch.rand(1, 3, size, size)


def steps(name: str, size: int) -> Steps:
    """The step "forward" of a candidate."""
    model, image = make(name, size)
    run = (lambda x: model.forward_head(model.forward_tiles(x))) if name == TILES else model
    return dict(forward=torch.inference_mode()(partial(run, image)))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--most", type=int, default=4096, help="largest side in pixels (4096)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for size in [size for size in SIZES if size <= args.most]:
        names = [name for name in (TILES, *MODELS) if not name.startswith("deit") or size <= 2048]
        for name in names:
            row, small = (
                run_interleaved({name: partial(steps, name, px)}, ["forward"], rounds, threads=args.threads)["forward"][
                    name
                ]
                for px, rounds in ((size, args.rounds), (SMALL, 1))
            )
            above = None
            if row["memory_gb"] is not None and small["memory_gb"] is not None:
                above = 1e3 * (row["memory_gb"] - small["memory_gb"]) - 12 * (size**2 - SMALL**2) / 1e6
            rows.append(dict(model=name, px=size, seconds=[ms / 1e3 for ms in row["ms"] or []], memory_mb=above))
            rows[-1]["problem"] = row["problem"]
            print(rows[-1], flush=True)
    versions = dict(torch=torch.__version__, vilonghorn=vilonghorn.__version__, processor=processor())
    write_json(RESULTS, dict(threads=args.threads, **versions, rows=rows))
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        line = {"model": f"`{name}`"}
        for row in rows:
            if row["model"] == name and row["seconds"]:
                line[f"{row['px']} px: s, MB"] = f"{min(row['seconds']):.2f}, {row['memory_mb']:.0f}"
        lines.append(line)
    write_page(Path(__file__).parents[1] / "docs" / "streams.md", {"large images": markdown(lines)})
    print(markdown(lines))


if __name__ == "__main__":
    main()
