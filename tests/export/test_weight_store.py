"""Weights are streamed: same bytes where the dtype matches, exact rounding where it does not, nothing half-written."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_export import weight_store
from dflash_export.tensor_files import read_header, read_tensor_places
from dflash_export.weight_store import store_weights
from dflash_runtime.bundle import sha256_of
from dflash_runtime.errors import CheckpointError, OutputError


def _quiet(stage: str, done: int, total: int) -> None: ...


def _checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "wanted"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_values_are_those_of_a_cast_in_torch(
    tmp_path: Path, stored: torch.dtype, name: str, wanted: torch.dtype
) -> None:
    tensors = {"b": torch.randn(37, 5).to(stored), "a": torch.randn(3).to(stored)}
    places = read_tensor_places(_checkpoint(tmp_path / "in", tensors))
    written = store_weights(tmp_path, "weights/target.safetensors", places, name, _quiet)
    found = load_file(tmp_path / "weights/target.safetensors")
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor.to(wanted))
    assert written.facts.sha256 == sha256_of(tmp_path / "weights/target.safetensors")
    assert written.facts.size_bytes == (tmp_path / "weights/target.safetensors").stat().st_size
    entry = written.entries["b"]
    raw = (tmp_path / entry.file).read_bytes()[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=wanted).view(37, 5), tensors["b"].to(wanted))


def test_a_weight_too_large_for_fp16_is_refused_with_the_value(tmp_path: Path) -> None:
    places = read_tensor_places(_checkpoint(tmp_path / "in", {"w": torch.tensor([1.0, 1e5])}))
    with pytest.raises(CheckpointError, match=r"w holds 1e\+05.*F16.*bf16"):
        store_weights(tmp_path, "w.safetensors", places, "F16", _quiet)


def test_a_weight_that_vanishes_in_fp16_is_refused_by_name(tmp_path: Path) -> None:
    noise = torch.randn(64, 64)
    for scale, stored in ((1e-9, torch.float32), (1e-7, torch.bfloat16)):
        places = read_tensor_places(_checkpoint(tmp_path / "in", {"w": (scale * noise).to(stored)}))
        with pytest.raises(CheckpointError, match=r"w loses \d+% of itself in F16.*bf16"):
            store_weights(tmp_path, "w.safetensors", places, "F16", _quiet)
        store_weights(tmp_path, "w.safetensors", places, "BF16", _quiet)
    few = torch.cat([noise.flatten(), torch.full((64,), 1e-9)])
    tensors = {"w": few, "w.bias": 1e-9 * noise[0].contiguous(), "zeros": torch.zeros(5)}
    store_weights(tmp_path, "w.safetensors", read_tensor_places(_checkpoint(tmp_path / "in", tensors)), "F16", _quiet)


def test_quantised_tensors_are_named(tmp_path: Path) -> None:
    places = read_tensor_places(_checkpoint(tmp_path / "in", {"packed": torch.zeros(4, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="packed is stored as I8"):
        store_weights(tmp_path, "w.safetensors", places, "F32", _quiet)


@pytest.mark.parametrize("limit_bytes", [10, 5_000, 90_000])
def test_a_full_disk_is_one_clear_error(tmp_path: Path, limit_bytes: int) -> None:
    import signal

    places = read_tensor_places(_checkpoint(tmp_path / "in", {"w": torch.zeros(30_000)}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(OutputError, match=r"writing 120\d\d\d bytes to .* failed"):
            store_weights(tmp_path, "w.safetensors", places, "F32", _quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_was_cut_off_goes_on_where_its_bytes_can_be_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    save_file({f"w{i}": torch.randn(64, 8) for i in range(6)}, tmp_path / "s.safetensors")
    places = read_header(tmp_path / "s.safetensors")
    whole = store_weights(tmp_path / "whole", "w.safetensors", places, "BF16", _quiet)
    monkeypatch.setattr(weight_store, "_NOTE_BYTES", 1)
    record, file = tmp_path / "record.json", tmp_path / "w.safetensors"

    def cut_off_after(num_calls: int) -> list[int]:
        calls: list[int] = []

        def progress(stage: str, done: int, total: int) -> None:
            calls.append(done)
            if len(calls) == num_calls:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            stored = store_weights(tmp_path, "w.safetensors", places, "BF16", progress, record=record)
            assert stored == whole
        return calls

    assert len(cut_off_after(4)) == 4
    assert len(cut_off_after(99)) == 3  # the fourth tensor was not noted yet
    assert file.read_bytes() == (tmp_path / "whole" / "w.safetensors").read_bytes()
    cut_off_after(0)
    file.write_bytes(file.read_bytes()[:-600] + b"?" * 600)
    assert len(cut_off_after(99)) == 6  # damage is not trusted: all of it again
    assert file.read_bytes() == (tmp_path / "whole" / "w.safetensors").read_bytes()
