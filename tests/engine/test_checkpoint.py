"""Checkpoints: whole or not there, and readable without trust."""

import os

import pytest
import safetensors.torch
import torch

from vilonghorn.engine.checkpoint import STATE_KEYS, load_state, load_weights, save_state

STATE = dict.fromkeys(STATE_KEYS)


def test_a_state_that_holds_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    save_state(tmp_path / "last.pt", {**STATE, "bomb": Bomb()})
    with pytest.raises(ValueError, match="not the state of a run"):
        load_state(tmp_path / "last.pt")
    assert not (tmp_path / "exploded").exists()


def test_a_truncated_a_foreign_and_a_missing_state_are_told_apart(tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(FileNotFoundError, match="there is no last.pt in"):
        load_state(path)
    save_state(path, {**STATE, "tensor": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ValueError, match="last.pt is damaged.*: its checksum is wrong; start again by --overwrite"):
        load_state(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not the state of a run"):
        load_state(path)
    torch.save({"format": 1}, path)
    with pytest.raises(ValueError, match="format 3"):
        load_state(path)
    save_state(path, ["no", "mapping"])
    with pytest.raises(ValueError, match="expected a dict with config, data, ema"):
        load_state(path)


def test_one_flipped_bit_of_a_state_is_noticed(tmp_path):
    path = tmp_path / "last.pt"
    save_state(path, {**STATE, "tensor": torch.zeros(1000)})
    data = path.read_bytes()
    for position in range(0, len(data), 331):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ValueError, match="last.pt"):
            load_state(path)
    path.write_bytes(data)
    load_state(path)


def test_missing_and_broken_weights_are_named(tmp_path):
    path = tmp_path / "best.safetensors"
    with pytest.raises(FileNotFoundError, match="best.safetensors"):
        load_weights(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_weights(path)
    for metadata in (None, {"vilonghorn": "not JSON"}, {"vilonghorn": "[1]"}):
        safetensors.torch.save_file({"a": torch.zeros(1)}, path, metadata)
        with pytest.raises(ValueError, match="record of a run"):
            load_weights(path)
