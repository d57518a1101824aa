"""A study of seconds: two candidates and two tasks."""

import copy
from pathlib import Path
from typing import Any

import yaml
from study.plan import Study
from study.results import Report

PLAN = yaml.safe_load("""
title: A toy.
reference: longhorn
shared_kwargs: {embed_dim: 16, depth: 1, patch_size: 8}
seeds: [0, 1]
sweep_seeds: [0]
thresholds: [50]
recipe:
  data: {batch_size: 8, mean: [0.0, 0.0, 0.0], std: [0.25, 0.25, 0.25], crop_pct: 1.0, interpolation: area, workers: 1}
  schedule: {epochs: 4, warmup_epochs: 1}
  augmentation: {scale: [1.0, 1.0], ratio: [1.0, 1.0], hflip: 0.0, mixup: 0.0, cutmix: 0.0, label_smoothing: 0.0,
                 auto_augment: null, color_jitter: 0.0, erase: 0.0, repeats: 1}
  ema: {decay: 0.0}
  run: {device: cpu, log_updates: 2}
candidates:
  longhorn: {title: Longhorn, model: vilonghorn_nano}
  vit: {title: ViT, model: vit_tiny_patch16_224, kwargs: {num_heads: 2}, match: {mlp_ratio: [0.25, 8, 0.125]}}
tasks:
  recall:
    kind: recall
    options: {pairs: 2, grid: 4, colours: 1}
    count: {train: 34, val: 8, test: 8}
    parts: 2
    sweep: [0.001, 0.01]
    tests: {test: {}, large: {grid: 8, distractors: true}}
    test_count: {large: 3}
  copy:
    kind: recall
    options: {pairs: 1, grid: 2, colours: 1}
    count: {train: 16, val: 8, test: 8}
    candidates: [longhorn]
    rates_of: recall
tables:
  recall: {title: Recall, axis: tokens, points: [[recall, test, 16], [recall, large, 64]]}
""")


def write_plan(path: Path, **changes: Any) -> Path:
    """Writes the plan with changes; `tasks__copy__sweep=[0.1]` changes tasks.copy.sweep."""
    plan = copy.deepcopy(PLAN)
    for key, value in changes.items():
        *way, last = key.split("__")
        place = plan
        for name in way:
            place = place[name]
        place[last] = value
    path.write_text(yaml.safe_dump(plan))
    return path


def toy_report(ours=(90.0, 92.0, 94.0), theirs=(70.0, 75.0, 74.0), **changes) -> Report:
    """Two candidates on a task with two test sets, three seeds."""
    cells = [
        dict(
            task="recall",
            candidate=name,
            rate=rate,
            seed=seed,
            parameters=1000,
            commit="0123456789abcdef+",
            seconds=36.0,
            val=dict(top1=50.0 + seed, loss=1.0),
            curve=[dict(images=100, top1=30.0), dict(images=200, top1=value)],
            tests=dict(test=dict(top1=value, chance=10.0), large=dict(top1=value / 2, chance=10.0)),
        )
        for name, rate, values in (("longhorn", 0.01, ours), ("vit", 0.02, theirs))
        for seed, value in enumerate(values)
    ]
    for name, lost in (("longhorn", (0.02, 0.03)), ("vit", (0.01, 0.03))):
        common = dict(task="recall", candidate=name, seed=0, tests=None)
        cells += [dict(common, rate=rate, seconds=1.0, diverged="11 updates in a row") for rate in lost]
    task = dict(PLAN["tasks"]["recall"], sweep=[0.01, 0.02, 0.03])
    plan = Study(**{**PLAN, "tasks": {"recall": task}, "seeds": [0, 1, 2], "thresholds": [60, 99]})
    values = dict(command=["python", "-m", "x y"], commit=None, date="2025-01-02T03", machine=dict(cpu="a processor"))
    values |= dict(study="toy", finished=True, plan=plan, cells=cells)
    return Report(**(values | changes))
