"""Why the exact rule forgets in images of more than 4,096 tiles.

    python studies/forgetting.py    # after: python studies/study million

The keys of all tiles lie near one direction, which each tile overwrites. What is remembered lies beside it. The keys of
distractors have small components there, and each tile overwrites a share of what is remembered: the square of the
component, of a key of length 1. Here components of less than a threshold are removed from the keys of trained weights,
of all tiles alike, without training. The common direction is that of other images, of 256 tiles. A finished row of
results/forgetting.json is not run again. One thread.
"""

import json
import time
from functools import partial
from unittest.mock import patch

import torch
from million import BATCH, RUNS, in_pieces, mosaics, right
from million import RESULTS as STREAMS
from study import mixers
from study.plan import Cell
from study.training import run_directory
from torch import Tensor

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine import load_run
from vilonghorn.models.vim import VisionSSM
from vilonghorn.ops import scan

RESULTS = STREAMS.with_name("forgetting.json")
CELL = Cell("million", "exact", 0.004, 1)
IMAGES = {2**8: 256, 2**14: 32, 2**16: 32, 2**18: 16, 2**20: 32}
THRESHOLDS = {2**8: (0, 0.01), 2**14: (0, 0.01), 2**16: (0, 0.001, 0.01), 2**18: (0, 0.01), 2**20: (0.01,)}
FIRST = 1024  # mosaic: million.py reads those before it
SHARES = (0.05, 0.5, 0.9, 0.99)  # quantiles of tiles


def split(k: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """The part of keys (G, B, L, N) along unit vectors (G, N), and the share of their square beside these."""
    along = (k * common[:, None, None]).sum(-1, keepdim=True) * common[:, None, None]
    return along, (k - along).square().sum(-1, keepdim=True) / k.square().sum(-1, keepdim=True)


def without_small(
    commons: dict[int, Tensor], threshold: float, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, **options: Tensor
) -> tuple[Tensor, Tensor]:
    """`scan` with keys from which a share beside the common direction is removed where it is below the threshold."""
    along, share = split(k, commons[options["dt_bias"].data_ptr()])
    return scan(x, dt, torch.where(share < threshold, along, k), q, **options)


def read_keys(model: VisionSSM) -> dict[int, Tensor]:
    """The keys (G, B, L, N) of eight images of 256 tiles, by the address of the mixer's dt_bias."""
    found = {}

    def keep(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
        found[options["dt_bias"].data_ptr()] = k  # the last of three readings, with the states of both directions
        return scan(x, dt, k, q, **options)

    with patch.object(mixers, "scan", keep):
        in_pieces(model, mosaics(256, BATCH), range(BATCH))
    return found


def principal(k: Tensor) -> Tensor:
    """The unit vectors (G, N) along which keys (G, B, L, N), each of length 1, have the largest squares."""
    unit = k / k.norm(dim=-1, keepdim=True)
    return torch.linalg.eigh(torch.einsum("gbln,gblm->gnm", unit, unit))[1][:, :, -1]


def main() -> None:
    """Writes the results."""
    torch.set_num_threads(1)
    model = load_run(run_directory(RUNS, CELL), "last")[0]
    keys = read_keys(model)
    commons = {mixer: principal(k) for mixer, k in keys.items()}
    shares = []
    for number, block in enumerate(model.blocks):
        mixer = block.mixer.dt_bias.data_ptr()
        for g, share in enumerate(split(keys[mixer], commons[mixer])[1]):
            quantiles = torch.quantile(share.flatten(), torch.tensor(SHARES)).tolist()
            shares.append({"block": number, "direction": g, "share": [float(f"{q:.2g}") for q in quantiles]})
            print(shares[-1], flush=True)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    done = {(row["tiles"], row["threshold"], row["images"]) for row in rows}
    for tiles, count in IMAGES.items():
        for threshold in THRESHOLDS[tiles]:
            if (tiles, threshold, count) in done:
                continue
            start = time.monotonic()
            with patch.object(mixers, "scan", partial(without_small, commons, threshold)):
                found = right(model, False, tiles, count, FIRST)
            rows.append({"tiles": tiles, "threshold": threshold, "images": count, "right": found})
            rows[-1]["seconds"] = round(time.monotonic() - start)
            print(rows[-1], flush=True)
            write_json(RESULTS, {"command": ["python", "studies/forgetting.py"], "shares": shares, "rows": rows})


if __name__ == "__main__":
    main()
