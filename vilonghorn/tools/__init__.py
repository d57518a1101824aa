"""Commands of `vilonghorn`, see `vilonghorn/commands.py`."""
