"""Settings that all tests share. This folder is on the import path, so that tests can say `from oracle import oracle`."""

import hypothesis
import torch

# One core of a shared machine can be slow: a deadline would test the machine.
hypothesis.settings.register_profile("vilonghorn", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("vilonghorn")

torch.set_num_threads(2)
