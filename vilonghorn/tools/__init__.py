"""Commands: each module runs as `python -m vilonghorn.tools.NAME`."""
