"""Training and measuring any timm model: configuration, the loop, checkpoints, and the directory of a run."""

from .build import build_model
from .config import Config
from .distributed import Ranks
from .evaluate import evaluate, evaluate_run, load_run
from .interrupt import Interrupted
from .options import build_parser, complete, load_config, parse
from .train import Trainer

__all__ = [
    "Config",
    "Interrupted",
    "Ranks",
    "Trainer",
    "build_model",
    "build_parser",
    "complete",
    "evaluate",
    "evaluate_run",
    "load_config",
    "load_run",
    "parse",
]
