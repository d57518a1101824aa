"""Checkpoints: whole or not there, and readable without trust."""

import os

import pytest
import safetensors.torch
import torch

from vilonghorn.engine.checkpoint import load_state, load_weights, save_state


def test_a_state_that_holds_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    save_state(tmp_path / "last.pt", {"bomb": Bomb()})
    with pytest.raises(ValueError, match="not the state of a run"):
        load_state(tmp_path / "last.pt")
    assert not (tmp_path / "exploded").exists()


def test_a_damaged_a_foreign_and_a_missing_state_are_told_apart(tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(FileNotFoundError, match="there is no last.pt in"):
        load_state(path)
    save_state(path, {"tensor": torch.zeros(1000)})
    load_state(path)
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(100, len(data), 331)]
    for damaged in (data[:1500], *flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="last.pt is damaged.*: its checksum is wrong; start again by --overwrite"):
            load_state(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not the state of a run"):
        load_state(path)
    torch.save({"format": 1}, path)
    with pytest.raises(ValueError, match="format 3"):
        load_state(path)


@pytest.mark.parametrize("metadata", [None, {"vilonghorn": "not JSON"}, {"vilonghorn": "[1]"}])
def test_weights_without_a_record_are_named(tmp_path, metadata):
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "best.safetensors", metadata)
    with pytest.raises(ValueError, match="best.safetensors has .* record of a run"):
        load_weights(tmp_path / "best.safetensors")
