"""FFCV's `.beton` files: format, writer and checks."""
