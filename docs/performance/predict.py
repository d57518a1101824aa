"""Predicts times on an H200 from docs/performance/block.json and kernels.json: `python docs/performance/predict.py`.

No GPU has confirmed this model:

- A scan takes its steps times the modelled cycles of a step (stalls.py), at 1.98 GHz. Blocks run in waves: as many as
  registers and shared memory admit fill the 132 multiprocessors, and the blocks that are left run after them. It takes
  no less than its bytes at 4 TB/s. With heads it runs in chunks of 16 tokens of Triton, one warp for 32 channels.
- Any other launch takes the longer of its bytes at 4 TB/s and its matrix products at 600 TFLOP/s (attention: 300).
- A training step is 24 blocks of `vilonghorn_tiny`, 8 with heads, or 12 of DeiT-Ti. Stem, head, loss and
  optimiser are left out, and so is the time between launches. Bytes grow with the tokens, operations of attention with
  their square.
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
HEADS = "heads"  # equal blocks of the exact rule with heads and an MLP, as those of the late stages of `vilonghornv2_*`
HEADS_BLOCK = dict(rule="longhorn_exact", num_heads=4, d_conv=(3, 3), expand=1, mlp_ratio=7 / 12)
HEADS_WIDTH, HEADS_DEPTH = 384, 8
DEPTH = {"longhorn": 24, "longhorn_exact": 24, "mamba": 24, HEADS: HEADS_DEPTH, "deit": 12}
RULES = ("longhorn", "longhorn_exact", "mamba")
BATCH, TOKENS, CHANNELS = 128, 197, 384  # of block.json
SIZES = {224: (128, 197), 512: (128, 1025), 1024: (64, 4097)}  # batch and tokens by pixels
PASSES = ("forward", "backward")
HEAD_BLOCK = 32  # channels of a program of the chunk kernel


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
        self.kernels |= {(HEADS, row["kernel"].split("_")[1]): row for row in modelled if row["backend"] == "triton"}

    def scan(self, rule: str, direction: str, batch: int, tokens: int, channels: int = CHANNELS) -> dict[str, float]:
        """`scan_time` of all directions, with the time of its bytes as the least."""
        kernel = self.kernels[rule, direction]
        sizes = dict(batch=batch, tokens=tokens, channels=channels, rule=rule) | {"pass": direction}
        if rule == HEADS:
            programs = batch * HEADS_BLOCK["num_heads"] * -(-channels // HEADS_BLOCK["num_heads"] // HEAD_BLOCK)
            steps = -(-tokens // kernel["chunk"]) * kernel["chunk"]
            launch = dict(blocks=programs, threads=32, shared=kernel["shared"], tokens=steps)
        else:
            [launch] = (row for row in self.scans if sizes.items() <= row.items())
        time = scan_time(launch, kernel)
        scale = batch * tokens * channels / (BATCH * TOKENS * CHANNELS)
        time["us"] = max(time["us"], scale * self.blocks[rule, direction]["scan_mb"] / BANDWIDTH * 1e12)
        return time

    def block(self, block: str, direction: str, batch: int, tokens: int) -> float:
        """Microseconds of one pass of a block."""
        scale, time = batch * tokens / (BATCH * TOKENS), 0.0
        for name, mb, gflop in self.blocks[block, direction]["kernels"]:
            if "scan" in name:
                time += self.scan(block, direction, batch, tokens)["us"]
                continue
            peak, growth = (ATTENTION, tokens / TOKENS) if "attention" in name else (PRODUCTS, 1)
            time += 1e6 * scale * max(mb * 1e6 / BANDWIDTH, gflop * 1e9 * growth / peak)
        return time

    def images(self, block: str, batch: int, tokens: int) -> float:
        """Images a second of a training step."""
        step = DEPTH[block] * sum(self.block(block, direction, batch, tokens) for direction in PASSES)
        return batch / step * 1e6


def predictions(folder: Path) -> dict[str, list[Line]]:
    """The tables of docs/performance/gpu.md, by the name of their marks."""
    model = Model(folder)
    return {name: list(lines(model)) for name, lines in TABLES.items()}


def block_lines(model: Model) -> Iterator[Line]:
    """Launches, bytes and memory of a training block."""
    for block in DEPTH:
        rows = [model.blocks[block, direction] for direction in PASSES]
        line = {"block": block}
        line["launches, forward / backward"] = " / ".join(str(row["launches"]) for row in rows)
        line["MB beside the scan"] = " / ".join(f"{row['mb']:.0f}" for row in rows)
        line["MB kept"] = f"{rows[0]['kept_mb']:.0f}"
        line["GB kept by the model"] = f"{rows[0]['kept_mb'] * DEPTH[block] / 1e3:.1f}"
        times = [model.block(block, direction, BATCH, TOKENS) for direction in PASSES]
        line["predicted µs"] = " / ".join(f"{time:.0f}" for time in times)
        yield line


def scan_lines(model: Model) -> Iterator[Line]:
    """Modelled times of all directions, and the waves of backward by batch."""
    for rule in (*RULES, HEADS):
        times = (f"{model.scan(rule, direction, BATCH, TOKENS)['us']:.0f}" for direction in PASSES)
        line = {"rule": rule, "µs, forward / backward": " / ".join(times)}
        for name, channels in (("tiny", CHANNELS), ("small", 2 * CHANNELS)):
            waves = (model.scan(rule, "backward", batch, TOKENS, channels)["waves"] for batch in (64, 128, 256))
            line[f"waves of backward, {name}, batch 64 / 128 / 256"] = " / ".join(f"{n:.2f}" for n in waves)
        yield line


def image_lines(model: Model) -> Iterator[Line]:
    """Predicted images a second of training, beside DeiT-Ti."""
    for size, (batch, tokens) in SIZES.items():
        images = {block: model.images(block, batch, tokens) for block in (*RULES, HEADS, "deit")}
        line = {"px": str(size), "batch": str(batch), "DeiT-Ti": f"{images['deit']:,.0f}"}
        yield line | {name: f"{images[name]:,.0f} ({images[name] / images['deit']:.2f})" for name in (*RULES, HEADS)}


TABLES = {"blocks": block_lines, "scans": scan_lines, "images": image_lines}


def main() -> int:
    """Prints the tables; returns the exit status."""
    print("\n\n".join(markdown(lines) for lines in predictions(FOLDER).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
