"""From image files to batches: writing and checking `.beton` files, and loaders of them or of image folders."""

from .beton.format import Beton, BetonError, check_beton
from .beton.writer import write_beton
from .image_folder import ImageFolder
from .loaders import create_loader
from .loaders.config import LoaderConfig
from .loaders.loader import Loader

__all__ = [
    "Beton",
    "BetonError",
    "ImageFolder",
    "Loader",
    "LoaderConfig",
    "check_beton",
    "create_loader",
    "write_beton",
]
