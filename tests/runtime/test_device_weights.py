"""Weights on the device: the right bits, each once, and never more than a piece of them on the host."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording_device import RecordingDevice

from dflash_runtime import device_weights
from dflash_runtime.bundle import Bundle, WeightEntry
from dflash_runtime.device_engine import BoundWeight
from dflash_runtime.device_weights import upload_weights
from dflash_runtime.errors import EngineError

ml_dtypes = pytest.importorskip("ml_dtypes")
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def with_weights(tiny: Path, folder: Path, weights: dict[str, Any]) -> Bundle:
    """A bundle whose index lists `weights` alone: name -> array."""
    bundle, entries, offset = Bundle.open(tiny, check_files=False), {}, 8
    (folder / "weights").mkdir()
    with (folder / "weights" / "w.safetensors").open("wb") as stream:
        stream.write(b"somethin")
        for name, array in weights.items():
            dtype = next(text for text, kind in TYPES.items() if array.dtype == kind)
            entries[name] = WeightEntry("weights/w.safetensors", offset, array.nbytes, dtype, list(array.shape))
            stream.write(array.tobytes())
            offset += array.nbytes
    return Bundle(folder, dataclasses.replace(bundle.manifest, weights=entries))


def values(seed: int, *shape: int) -> Any:
    """Of every size a half can hold, with ties between two of them, zeros and subnormals."""
    rng = np.random.default_rng(seed)
    made = (rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 4, shape)).astype(np.float32)
    made.reshape(-1)[:6] = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 60000]
    return made


def on_device(device: RecordingDevice, buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    device.finish()
    return device.view(*buffer).view(TYPES[dtype]).reshape(shape)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("staging_bytes", [64, 1000, 1 << 20])
def test_every_type_is_converted_as_rounding_says(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wanted: str, staging_bytes: int
) -> None:
    monkeypatch.setattr(device_weights, "_STAGING_BYTES", staging_bytes)
    arrays = {f"w{i}": values(i, *shape).astype(TYPES[stored]) for i, shape in enumerate([(33, 7), (19,), (1, 6)])}
    bundle, device = with_weights(tiny, tmp_path, arrays), RecordingDevice()
    places = upload_weights(device, bundle, [BoundWeight(name, name, wanted) for name in arrays])
    for name, array in arrays.items():
        with np.errstate(over="ignore"):
            expected = array.astype(np.float32).astype(TYPES[wanted])
        found = on_device(device, places[name, wanted], wanted, array.shape)
        assert found.tobytes() == expected.tobytes()
    device.check_guards()


def test_two_inputs_share_a_weight_and_a_type(tiny: Path, tmp_path: Path) -> None:
    bundle, device = with_weights(tiny, tmp_path, {"embed": values(0, 9, 8)}), RecordingDevice()
    bound = [BoundWeight(f"embed{i}", "embed", dtype) for i, dtype in enumerate(["F32", "F32", "F16", "F16", "F32"])]
    places = upload_weights(device, bundle, bound)
    assert set(places) == {("embed", "F32"), ("embed", "F16")}
    assert [entry[1] for entry in device.log if entry[0] == "upload"] == [9 * 8 * 4, 9 * 8 * 2]
    assert len([entry for entry in device.log if entry[0] == "allocate"]) == 1


def test_the_host_holds_only_a_piece(tiny: Path, tmp_path: Path) -> None:
    """Peak at open: 240 MB of weights, widened, and less than 100 MB of the host besides the device's own memory."""
    rows = np.zeros((60, 1 << 20), TYPES["BF16"])
    bundle, device = with_weights(tiny, tmp_path, {"embed": rows, "other": rows[:1]}), RecordingDevice()
    del rows
    tracemalloc.start()
    upload_weights(device, bundle, [BoundWeight("a", "embed", "F32"), BoundWeight("b", "other", "BF16")])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    on_the_device = sum(entry[1] for entry in device.log if entry[0] == "allocate")
    assert on_the_device > 240e6
    assert peak - on_the_device < 100e6 and device.host_bytes < 50e6


def test_what_does_not_fit_is_refused(tiny: Path, tmp_path: Path) -> None:
    arrays = {"large": np.full((3, 4), 1e5, np.float32), "infinite": np.full((3, 4), np.inf, np.float32)}
    bundle = with_weights(tiny, tmp_path, arrays)
    with pytest.raises(EngineError, match=r"'large' holds 1e\+05; fp16 ends at 65504.*--precision bf16"):
        upload_weights(RecordingDevice(), bundle, [BoundWeight("a", "large", "F16")])
    upload_weights(RecordingDevice(), bundle, [BoundWeight("a", "infinite", "F16"), BoundWeight("a", "large", "BF16")])
    with pytest.raises(EngineError, match="'small' as F16; the bundle has no such weight"):
        upload_weights(RecordingDevice(), bundle, [BoundWeight("a", "small", "F16")])
    assert upload_weights(RecordingDevice(), bundle, []) == {}


def test_a_planted_fault_shows(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that reads late sees the staging memory as it is then."""
    monkeypatch.setattr(device_weights, "_STAGING_BYTES", 64)
    monkeypatch.setattr(RecordingDevice, "wait", lambda self: None)
    array = values(0, 33, 7)
    bundle, device = with_weights(tiny, tmp_path, {"w": array}), RecordingDevice()
    places = upload_weights(device, bundle, [BoundWeight("w", "w", "F32")])
    assert on_device(device, places["w", "F32"], "F32", array.shape).tobytes() != array.tobytes()


@pytest.mark.parametrize(("kind", "wanted", "flipped"), [("U8", "I8T", 0x80), ("F8_E4M3", "F8T", 0)])
def test_weights_of_eight_bits_are_turned(
    kind: str, wanted: str, flipped: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns become rows, however small the pieces are; 128 becomes a signed zero, floats stay as they are."""
    monkeypatch.setattr(device_weights, "_STAGING_BYTES", 100)
    stored = np.random.default_rng(1).integers(0, 256, (33, 7)).astype(np.uint8)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w.safetensors").write_bytes(b"head" + stored.tobytes())
    entry = WeightEntry("weights/w.safetensors", 4, stored.nbytes, kind, [33, 7])
    manifest = dataclasses.replace(Bundle.open(tiny, check_files=False).manifest, weights={"w": entry})
    device = RecordingDevice()
    places = upload_weights(device, Bundle(tmp_path, manifest), [BoundWeight("w", "w", wanted)])
    device.finish()
    found = device.view(*places["w", wanted]).view(np.uint8).reshape(7, 33)
    assert np.array_equal(found, stored.T ^ np.uint8(flipped))
    if kind == "U8":
        assert np.array_equal(found.view(np.int8), (stored.astype(np.int16) - 128).T)
    for other in {"BF16", "I8T", "F8T"} - {wanted}:
        with pytest.raises(EngineError, match=f"the bundle has it as {kind}"):
            upload_weights(device, Bundle(tmp_path, manifest), [BoundWeight("w", "w", other)])
