"""Predicts times on an H200 from docs/performance/block.json and kernels.json: `python docs/performance/predict.py`.

An H100 took 0.9 to 2.7 times as long as predicted (gpu.md). The model:

- A scan takes its steps times the modelled cycles of a step (stalls.py), at 1.98 GHz. Blocks run in waves: as many as
  registers and shared memory admit fill the 132 multiprocessors, and the blocks that are left run after them. It takes
  no less than its bytes at 4 TB/s. With heads it runs in chunks of 16 tokens of Triton, one warp for 32 channels.
- Any other launch takes the longer of its bytes at 4 TB/s and its matrix products at 600 TFLOP/s (attention: 300).
- A training step is 24 blocks of `vilonghorn_tiny`, 12 of DeiT-Ti, or all of `vilonghornv2_tiny` up to its head. The
  stems of the first two, head, loss and optimiser are left out, and so is the time between launches. Bytes grow with
  the tokens, operations of attention with their square.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vilonghorn.bench.tables import Line, markdown

FOLDER = Path(__file__).parent
MULTIPROCESSORS, SCHEDULERS, REGISTERS, SHARED, MAX_BLOCKS = 132, 4, 65536, 233472, 32
CLOCK, BANDWIDTH, PRODUCTS, ATTENTION = 1.98e9, 4.0e12, 600e12, 300e12
V2 = "vilonghornv2_tiny"
# Its parts: how often it has each, and the tokens of a 224-pixel image. Parts with a scan: width, heads.
V2_PARTS = {"stem": (1, 3136), "stages.0.blocks.0": (2, 3136)}
V2_PARTS |= {"stages.1.downsample": (1, 784), "stages.1.blocks.0": (2, 784)}
V2_PARTS |= {"stages.2.downsample": (1, 196), "stages.2.blocks.0": (3, 196)}
V2_PARTS |= {"stages.3.downsample": (1, 49), "stages.3.blocks.0": (2, 49)}
V2_SCANS = {"stages.2.blocks.0": (256, 4), "stages.3.blocks.0": (512, 8)}
BF16 = ", bf16"  # the same parts and model with a residual stream in bfloat16 (residual_in_fp32=False)
PARTS = V2_PARTS | {part + BF16: numbers for part, numbers in V2_PARTS.items() if part != "stem"}
DEPTH = {"longhorn": 24, "longhorn_exact": 24, "mamba": 24, "deit": 12}
RULES = ("longhorn", "longhorn_exact", "mamba")
BATCH, TOKENS, CHANNELS = 128, 197, 384  # of block.json
SIZES = {224: (128, 197), 512: (128, 1025), 1024: (64, 4097)}  # batch and tokens by pixels
PASSES = ("forward", "backward")
HEAD_BLOCK = 32  # channels of a program of the chunk kernel
CHUNKS = "chunks"  # the rows of kernels.json of the chunk kernel


def occupancy(launch: dict[str, Any], registers: int) -> int:
    """Blocks of a launch that one multiprocessor runs at once."""
    warps = -(-launch["threads"] // 32)
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, SHARED // (launch["shared"] + 1024), MAX_BLOCKS)


def scan_time(launch: dict[str, Any], kernel: dict[str, Any]) -> dict[str, float]:
    """Waves and microseconds of a scan that is not split over time, by its instructions alone.

    Args:
        launch: a row of block.json's scans; each warp runs all tokens of one direction.
        kernel: the row of kernels.json with its registers and cycles.
    """
    resident = occupancy(launch, kernel["registers"])
    slots = MULTIPROCESSORS * resident
    full, rest = divmod(launch["blocks"], slots)

    def cycles(blocks: int) -> float:  # of a step, with so many blocks on a multiprocessor
        warps = -(-blocks * launch["threads"] // 32 // SCHEDULERS) or 1
        modelled = kernel["cycles"]
        return modelled[min(warps, len(modelled)) - 1] * max(1, warps / len(modelled))

    step = full * cycles(resident) + (cycles(-(-rest // MULTIPROCESSORS)) if rest else 0)
    return dict(waves=launch["blocks"] / slots, us=launch["tokens"] * step / CLOCK * 1e6)


class Model:
    """The committed counts, and what follows from them."""

    def __init__(self, folder: Path):
        counts = json.loads((folder / "block.json").read_text())
        rows = json.loads((folder / "kernels.json").read_text())["rows"]
        self.blocks = {(row["block"], row["pass"]): row for row in counts["blocks"]}
        self.scans = counts["scans"]
        modelled = [row for row in rows if "cycles" in row and row["architecture"] == 90]
        self.kernels = {(row["rule"], row["kernel"]): row for row in modelled if row["backend"] == "cuda"}
        self.kernels |= {(CHUNKS, row["kernel"].split("_")[1]): row for row in modelled if row["backend"] == "triton"}

    def scan(self, block: str, direction: str, batch: int, tokens: int, channels: int = CHANNELS) -> dict[str, float]:
        """`scan_time` of all directions of a rule or of a part with heads, with the time of its bytes as the least."""
        sizes = dict(batch=batch, tokens=tokens, channels=channels, rule=block) | {"pass": direction}
        base = BATCH * TOKENS * CHANNELS
        if (part := block.removesuffix(BF16)) in V2_SCANS:
            kernel, (channels, heads) = self.kernels[CHUNKS, direction], V2_SCANS[part]
            programs = batch * heads * -(-channels // heads // HEAD_BLOCK)
            steps = -(-tokens // kernel["chunk"]) * kernel["chunk"]
            launch = dict(blocks=programs, threads=32, shared=kernel["shared"], tokens=steps)
            base = BATCH * PARTS[block][1] * channels
        else:
            kernel = self.kernels[block, direction]
            [launch] = (row for row in self.scans if sizes.items() <= row.items())
        time = scan_time(launch, kernel)
        scale = batch * tokens * channels / base
        time["us"] = max(time["us"], scale * self.blocks[block, direction]["scan_mb"] / BANDWIDTH * 1e12)
        return time

    def block(self, block: str, direction: str, batch: int, tokens: int) -> float:
        """Microseconds of one pass of a block or a part."""
        counted = PARTS[block][1] if block in PARTS else TOKENS
        scale, time = batch * tokens / (BATCH * counted), 0.0
        for name, mb, gflop in self.blocks[block, direction]["kernels"]:
            if "scan" in name:
                time += self.scan(block, direction, batch, tokens)["us"]
                continue
            peak, growth = (ATTENTION, tokens / counted) if "attention" in name else (PRODUCTS, 1)
            time += 1e6 * scale * max(mb * 1e6 / BANDWIDTH, gflop * 1e9 * growth / peak)
        return time

    def images(self, model: str, px: int) -> float:
        """Images a second of a training step."""
        batch, tokens = SIZES[px]
        parts = {model: (DEPTH.get(model), tokens)}
        if model in (V2, V2 + BF16):
            names = [part if part == "stem" else part + model.removeprefix(V2) for part in V2_PARTS]
            parts = {part: (PARTS[part][0], PARTS[part][1] * px**2 // 224**2) for part in names}
        step = sum(n * self.block(part, d, batch, tokens) for part, (n, tokens) in parts.items() for d in PASSES)
        return batch / step * 1e6


def predictions(folder: Path) -> dict[str, list[Line]]:
    """The tables of docs/performance/gpu.md, by the name of their marks."""
    model = Model(folder)
    return {name: list(lines(model)) for name, lines in TABLES.items()}


def block_lines(model: Model) -> Iterator[Line]:
    """Launches, bytes and memory of a training block."""
    counts = {**{block: (depth, TOKENS) for block, depth in DEPTH.items()}, **PARTS}
    kept = {part: model.blocks[part, "forward"]["kept_mb"] * count / 1e3 for part, (count, _) in counts.items()}
    for block, (count, tokens) in counts.items():
        rows = [model.blocks[block, direction] for direction in PASSES]
        line = {"block": block, "in the model": str(count)}
        line["launches, forward / backward"] = " / ".join(str(row["launches"]) for row in rows)
        line["MB beside the scan"] = " / ".join(f"{row['mb']:.0f}" for row in rows)
        line["MB kept"] = f"{rows[0]['kept_mb']:.0f}"
        of_model = f"{sum(kept[part] for part in V2_PARTS):.1f} (all parts)" if block == "stem" else "-"
        line["GB kept by the model"] = of_model if block in PARTS else f"{kept[block]:.1f}"
        times = [model.block(block, direction, BATCH, tokens) for direction in PASSES]
        line["predicted µs"] = " / ".join(f"{time:.0f}" for time in times)
        yield line


def scan_lines(model: Model) -> Iterator[Line]:
    """Modelled times of all directions, and the waves of backward by batch."""
    for rule in (*RULES, *V2_SCANS):
        tokens = V2_PARTS[rule][1] if rule in V2_PARTS else TOKENS
        times = (f"{model.scan(rule, direction, BATCH, tokens)['us']:.0f}" for direction in PASSES)
        line = {"scan": rule, "µs, forward / backward": " / ".join(times)}
        for name, channels in (("tiny", CHANNELS), ("small", 2 * CHANNELS)):
            waves = [
                f"{model.scan(rule, 'backward', batch, tokens, channels)['waves']:.2f}" for batch in (64, 128, 256)
            ]
            shown = rule in RULES or name == "tiny"
            line[f"waves of backward, {name}, batch 64 / 128 / 256"] = " / ".join(waves) if shown else "-"
        yield line


def image_lines(model: Model) -> Iterator[Line]:
    """Predicted images a second of training, beside DeiT-Ti."""
    for size, (batch, _) in SIZES.items():
        names = (*RULES, V2, V2 + BF16)
        images = {name: model.images(name, size) for name in (*names, "deit")}
        line = {"px": str(size), "batch": str(batch), "DeiT-Ti": f"{images['deit']:,.0f}"}
        yield line | {name: f"{images[name]:,.0f} ({images[name] / images['deit']:.2f})" for name in names}


TABLES = {"blocks": block_lines, "scans": scan_lines, "images": image_lines}


def main() -> int:
    """Prints the tables; returns the exit status."""
    print("\n\n".join(markdown(lines) for lines in predictions(FOLDER).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
