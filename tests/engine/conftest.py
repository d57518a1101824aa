"""One thread for the small models of these tests, and no pictures where a test does not ask for them."""

import pytest
import torch

import vilonghorn.engine.logger
import vilonghorn.engine.tasks.classification


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads of torch are slower than one here."""
    torch.set_num_threads(1)


@pytest.fixture
def pictures() -> None:
    """Lets runs draw their curves and report."""


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training the small models."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(vilonghorn.engine.logger, "draw_curves", lambda *arguments: None)
        for name in ("predict_all", "write_report"):
            monkeypatch.setattr(vilonghorn.engine.tasks.classification, name, lambda *arguments: None)
