"""Settings shared by all tests. This folder is on the import path: `from oracle import oracle` works."""

import hypothesis
import pytest
import torch

# One core of a shared machine can be slow: a deadline would test the machine.
hypothesis.settings.register_profile("vilonghorn", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("vilonghorn")

torch.set_num_threads(2)


@pytest.fixture(params=[1, 5])
def threads(request):
    """A number of torch's threads, during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
