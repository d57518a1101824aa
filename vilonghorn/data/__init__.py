"""From image files to batches: `.beton` files written and checked, and loaders over them or over image folders."""

from .base import Loader
from .beton_format import Beton, BetonError, check_beton
from .beton_writer import write_beton
from .imagenet import flat_images
from .images import ImageFolder
from .loader import create_loader

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
