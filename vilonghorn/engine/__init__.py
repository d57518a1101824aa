"""Training and evaluation of any timm model: configuration, training loop, checkpoints, run directory and report."""

from .command_line import build_parser, load_config, parse
from .config import Config
from .distributed import Distributed, Interrupted
from .evaluate import evaluate, evaluate_run, load_run
from .model_setup import model_from_config
from .trainer import Trainer

__all__ = ["Config", "Distributed", "Interrupted", "Trainer", "build_parser", "evaluate", "evaluate_run"]
__all__ += ["load_config", "load_run", "model_from_config", "parse"]
