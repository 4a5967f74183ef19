"""Rounding to the nearest: how far a weight moves, what is stored, and that nothing is read whole."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_export import quantized_places
from dflash_export.dequantized_weights import check_rounding, read_float_rows, read_float_weight
from dflash_export.quantization import choose_schemes, make_scheme, quantize_options
from dflash_export.quantized_places import quantize_places, round_rows
from dflash_export.tensor_files import TensorPlace, read_header
from dflash_export.weight_store import store_weights
from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import CheckpointError

SCHEMES = [("int8", 32, True), ("int4", 32, True), ("int4", 64, False)]
FLOAT8 = ("fp8", 32, True)


def quiet(stage: str, done: int, total: int) -> None: ...


def weights(folder: Path, dtype: torch.dtype, **shapes: tuple[int, ...]) -> dict[str, TensorPlace]:
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(made, folder / "model.safetensors")
    return read_header(folder / "model.safetensors")


def manifest_of(stored: object, quantized: dict[str, object]) -> Manifest:
    manifest = object.__new__(Manifest)
    object.__setattr__(manifest, "weights", stored.entries)  # type: ignore[attr-defined]
    object.__setattr__(manifest, "quantized", quantized)
    return manifest


@pytest.mark.parametrize(("kind", "group", "symmetric"), SCHEMES)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_come_back_within_a_step(tmp_path: Path, kind: str, group: int, symmetric: bool, dtype: str) -> None:
    places = weights(tmp_path, torch.bfloat16, a=(6, 128), kept=(5, 128), b=(3, 64))
    scheme = make_scheme(kind, group, symmetric=symmetric)
    assert scheme is not None
    parts, facts = quantize_places(places, {"a": scheme, "b": scheme}, dtype)
    stored = store_weights(tmp_path, "w.safetensors", parts, dtype, quiet)
    manifest = manifest_of(stored, facts)
    for name in ("a", "b"):
        original = torch.frombuffer(bytearray(b"".join(places[name].chunks())), dtype=torch.bfloat16)
        found = read_float_weight(tmp_path, manifest, name)
        rows = round_rows(original.view(found.shape).float(), scheme, {"F32": torch.float32, "F16": torch.float16,
                          "BF16": torch.bfloat16}[dtype])  # fmt: skip
        steps = rows.scales.float().abs().repeat_interleave(found.shape[1] // rows.scales.shape[1], dim=1)
        assert ((found - original.view(found.shape).float()).abs() <= 1.3 * steps).all()
        assert torch.equal(read_float_rows(tmp_path, manifest, name, [0, 2]), found[[0, 2]])
    (row,) = check_rounding(tmp_path, manifest, places, "target")
    assert row.passed and row.worst > 0.4
    with safe_open(tmp_path / "w.safetensors", "pt") as file:  # the format's own reader
        assert set(file.keys()) == set(stored.entries)
        assert file.get_tensor("kept").shape == (5, 128)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_fp8_is_the_nearest_there_is(tmp_path: Path, dtype: str) -> None:
    places = weights(tmp_path, torch.bfloat16, a=(6, 128), kept=(5, 128))
    parts, facts = quantize_places(places, {"a": make_scheme(*FLOAT8[:2])}, dtype)  # type: ignore[dict-item]
    stored = store_weights(tmp_path, "w.safetensors", parts, dtype, quiet)
    manifest = manifest_of(stored, facts)
    assert (stored.entries["a"].dtype, stored.entries["a.scales"].dtype) == ("F8_E4M3", "F32")
    original = torch.frombuffer(bytearray(b"".join(places["a"].chunks())), dtype=torch.bfloat16).view(6, 128).float()
    found = read_float_weight(tmp_path, manifest, "a")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    steps = every[every.isfinite()] * (original.abs().amax(1) / 448)[:, None]  # [rows, all values]
    nearest = (original[..., None] - steps[:, None]).abs().amin(-1)
    torch.testing.assert_close((found - original).abs(), nearest, rtol=1e-3, atol=1e-7)
    (row,) = check_rounding(tmp_path, manifest, places, "target")
    assert row.passed and row.tensor == "target fp8" and 0.4 < row.worst <= 0.501
    with safe_open(tmp_path / "w.safetensors", "pt") as file:  # the format's own reader
        assert file.get_tensor("a").dtype == torch.float8_e4m3fn
    data = bytearray((tmp_path / "w.safetensors").read_bytes())
    data[stored.entries["a"].offset_bytes + 5] ^= 1  # one step beside
    (tmp_path / "w.safetensors").write_bytes(data)
    (row,) = check_rounding(tmp_path, manifest, places, "target")
    assert not row.passed


def test_a_shifted_row_is_found(tmp_path: Path) -> None:
    places = weights(tmp_path, torch.float32, a=(8, 64))
    parts, facts = quantize_places(places, {"a": make_scheme("int4")}, "F32")  # type: ignore[dict-item]
    manifest = manifest_of(store_weights(tmp_path, "w.safetensors", parts, "F32", quiet), facts)
    entry = manifest.weights["a"]
    data = bytearray((tmp_path / "w.safetensors").read_bytes())
    start = entry.offset_bytes
    data[start : start + 64] = data[start + 32 : start + 64] + data[start : start + 32]
    (tmp_path / "w.safetensors").write_bytes(data)
    (row,) = check_rounding(tmp_path, manifest, places, "target")
    assert not row.passed and row.tensor == "target int4"


@pytest.mark.parametrize("values", [torch.zeros(2, 64), torch.full((2, 64), 1e-9), torch.full((2, 64), -3.0)])
@pytest.mark.parametrize(("kind", "group", "symmetric"), [*SCHEMES, FLOAT8])
def test_rows_without_spread_stay_finite(values: torch.Tensor, kind: str, group: int, symmetric: bool) -> None:
    scheme = make_scheme(kind, group, symmetric=symmetric)
    assert scheme is not None
    rows = round_rows(values, scheme, torch.float16)
    middle = 0 if scheme.floating else 1 << (scheme.bits - 1)
    points = torch.tensor(float(middle)) if rows.zero_points is None else rows.zero_points.float()[..., None]
    stored = rows.values.view(torch.float8_e4m3fn) if scheme.floating else rows.values
    grouped = (stored.float().reshape(2, rows.scales.shape[1], -1) - points) * rows.scales.float()[..., None]
    torch.testing.assert_close(grouped.reshape(2, 64), values, rtol=0.01, atol=1e-6)


def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    peaks, sizes = [], (4096, 16384)
    for rows in sizes:
        places = weights(tmp_path, torch.bfloat16, a=(rows, 1024))
        parts, _ = quantize_places(places, {"a": make_scheme("int4")}, "BF16")  # type: ignore[dict-item]
        tracemalloc.start()
        store_weights(tmp_path, "w.safetensors", parts, "BF16", quiet)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Scales wait as one block (a 64th of the weight) and threads hold pieces by chance; rounded values are a quarter.
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) * 1024 * 2 / 10


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_of_a_piece_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetric: bool) -> None:
    """Small blocks that stay among large ones that go keep the memory of these: 640 MB at a head of 152,064 rows."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(rows: torch.Tensor, **options: Any) -> quantized_places.QuantizedRows:
        made = round_rows(rows, **options)
        alive.extend(weakref.ref(t) for t in (made.scales, made.zero_points) if t is not None)
        return made

    monkeypatch.setattr(quantized_places, "round_rows", watched)
    places = weights(tmp_path, torch.bfloat16, a=(6144, 1024))
    parts, _ = quantize_places(places, {"a": make_scheme("int4", symmetric=symmetric)}, "BF16")  # type: ignore[dict-item]
    kept = [sum(ref() is not None for ref in list(alive)) for _ in parts["a"].chunks()]
    assert len(kept) == 32 and max(kept) <= 2 * 6  # pieces that are rounded ahead, and the one that is written


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_that_wait_are_those_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetric: bool
) -> None:
    scheme = make_scheme("int4", symmetric=symmetric)
    assert scheme is not None
    rounded: list[int] = []

    def counting(rows: torch.Tensor, **options: Any) -> quantized_places.QuantizedRows:
        rounded.append(len(rows))
        return round_rows(rows, **options)

    monkeypatch.setattr(quantized_places, "round_rows", counting)
    found = []
    for room, passes in ((1 << 20, 1), (0, 2 if symmetric else 3)):
        monkeypatch.setattr(quantized_places, "KEPT_SCALE_BYTES", room)
        rounded.clear()
        parts, _ = quantize_places(weights(tmp_path, torch.bfloat16, a=(700, 1024)), {"a": scheme}, "BF16")
        found.append(store_weights(tmp_path, f"{room}.safetensors", parts, "BF16", quiet).facts.sha256)
        assert len(rounded) > passes and sum(rounded) == passes * 700
    assert found[0] == found[1]


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    places = weights(tmp_path, torch.float32, a=(4, 96), vector=(8,))
    for build, message in (
        (lambda: quantize_places(places, {"a": make_scheme("int4", 64)}, "F32"), "of 64 do not.*--group-size 32"),
        (lambda: quantize_places(places, {"vector": make_scheme("int8")}, "F32"), "only float matrices"),
        (lambda: make_scheme("int4", 48), "a group of 48"),
        (lambda: make_scheme("int3"), "no kind of weights"),
        (lambda: quantize_options("int8", "keep", "keep", symmetric=False), "--asymmetric is for int4"),
        (lambda: choose_schemes([], ["table"], quantize_options("int4", "keep", "keep")), "nothing to quantise"),
        (lambda: choose_schemes(["a"], ["t"], quantize_options("keep", "int4", "keep")), "--quantize-head at keep"),
    ):
        with pytest.raises(CheckpointError, match=message):
            build()


def test_routers_are_kept() -> None:
    names = ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight"]
    chosen, notes = choose_schemes(names, [], quantize_options("int8", "keep", "keep"))
    assert list(chosen) == names[1:] and notes == ["1 router matrices keep the bundle's precision"]
