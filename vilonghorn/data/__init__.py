"""From image files to batches: `.beton` files written and checked, and loaders over them or over image folders."""

from .beton.format import Beton, BetonError, check_beton
from .beton.writer import write_beton
from .imagenet import flat_images
from .images import ImageFolder
from .loaders import create_loader
from .loaders.base import Loader

__all__ = [
    "Beton",
    "BetonError",
    "ImageFolder",
    "Loader",
    "check_beton",
    "create_loader",
    "flat_images",
    "write_beton",
]
