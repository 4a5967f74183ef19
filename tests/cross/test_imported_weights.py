"""Checkpoints quantised and written by each format's own library: the bundle means the weights the library means."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import quiet
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_target
from torch import Tensor, nn

from dflash_export.build_plan import BuildOptions
from dflash_export.dequantized_weights import read_float_weight
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import CheckpointError
from dflash_tools.pipeline import build

GROUP = 32
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""A matrix [out, in] -> the tensors the format stores under the module's name, and the weights it means."""


def write_quantized(folder: Path, config: dict[str, Any], quantise: Quantise, dtype: torch.dtype) -> dict[str, Tensor]:
    """A tiny Llama whose layers are quantised; returns what the library says its weights are."""
    write_target(folder, "llama", dtype=dtype)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stored, meant[name] = quantise(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=config)
    return meant


def build_and_compare(folder: Path, meant: dict[str, Tensor], precision: str, origin: str) -> Bundle:
    build(BuildOptions(str(folder), precision=precision), folder / "bundle", "ort-cpu", quiet)
    bundle = Bundle.open(folder / "bundle")
    facts = bundle.manifest.quantized
    assert facts.keys() == meant.keys() and {one.origin for one in facts.values()} == {origin}
    for name, expected in meant.items():
        found = read_float_weight(bundle.path, bundle.manifest, name).to(expected.dtype)
        assert torch.equal(found, expected), name
    return bundle


def quantise_with_compressed_tensors(bits: int, symmetric: bool, packed: bool, grouped: bool) -> Quantise:
    args_module = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy = "group" if grouped else "channel"
    args = args_module.QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=GROUP if grouped else None, type="int"
    )
    scheme = args_module.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = PackedQuantizationCompressor if packed else IntQuantizationCompressor

    def quantise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = weight.reshape(weight.shape[0], -1, GROUP) if grouped else weight[:, None]
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        if not symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        stored = compressor.compress(state, scheme)
        meant = compressor.decompress(stored, scheme)["weight"]
        return stored, meant

    return quantise


def compressed_tensors_config(bits: int, symmetric: bool, packed: bool, grouped: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if grouped else "channel",
               "group_size": GROUP if grouped else None, "actorder": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("variant", "precision"),
    [((4, True, True, True), "bf16"), ((4, False, True, True), "fp32"), ((8, True, False, False), "bf16"),
     ((8, True, True, True), "fp32"), ((4, True, True, False), "fp32")],
    ids=["w4a16", "w4a16-asym", "w8a16-int", "w8a16-packed-groups", "w4a16-channel"],
)  # fmt: skip
def test_compressed_tensors(tmp_path: Path, variant: tuple[int, bool, bool, bool], precision: str) -> None:
    quantise = quantise_with_compressed_tensors(*variant)
    meant = write_quantized(tmp_path / "t", compressed_tensors_config(*variant), quantise, torch.bfloat16)
    bundle = build_and_compare(tmp_path / "t", meant, precision, "compressed-tensors")
    assert all(row.passed for row in bundle.manifest.checks)


@functools.cache
def from_package_file(package: str, path: str) -> Any:
    """A module of an installed package without what the package's own `__init__` would import."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(next(iter(found.submodule_search_locations)))
    names = [package, *(f"{package}.{'.'.join(path.split('.')[: i + 1])}" for i in range(len(path.split("."))))]
    for name in names[:-1]:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]  # type: ignore[attr-defined]
            sys.modules[name] = module
    return importlib.import_module(names[-1])


def quantise_with_awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    gemm = from_package_file("awq", "modules.linear.gemm")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = ((groups.amax(-1) - groups.amin(-1)).clamp(min=1e-5) / 15).half().float()
    zeros = (-(groups.amin(-1) / scales).round()).clamp(0, 15)
    with torch.no_grad():
        linear.weight.copy_(weight.float())
        packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.T.contiguous(), zeros.T.contiguous())
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    meant = gemm.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T.contiguous()
    return stored, meant


def test_awq(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    meant = write_quantized(tmp_path / "t", config, quantise_with_awq, torch.float16)
    build_and_compare(tmp_path / "t", meant, "fp16", "AWQ")
    with pytest.raises(CheckpointError, match=r"scales in fp16, which bf16 cannot hold.*--precision fp16 or fp32"):
        build(BuildOptions(str(tmp_path / "t"), precision="bf16"), tmp_path / "b", "none", quiet)
    edit_json(tmp_path / "t" / "config.json", quantization_config={**config, "version": "gemv"})
    with pytest.raises(CheckpointError, match="layout 'gemv' are not taken"):
        build(BuildOptions(str(tmp_path / "t")), tmp_path / "b", "none", quiet)


def quantise_with_gptqmodel(bits: int, order: Tensor | None, first_version: bool) -> Quantise:
    kernels = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    largest, middle = 2**bits - 1, 2 ** (bits - 1)

    def quantise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        g_idx = torch.arange(columns) // GROUP if order is None else (order[:columns] % (columns // GROUP))
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight.float()
        scales = torch.stack([weight.float()[:, g_idx == g].abs().amax(-1) for g in range(columns // GROUP)], dim=1)
        scales = (scales / (middle - 1)).half().float()
        packed = kernels.TorchLinear(bits, GROUP, True, False, columns, rows, False)
        packed.pack_original(linear, scales, torch.full_like(scales, middle), g_idx.to(torch.int32))
        meant = (weight.float() / scales[:, g_idx]).round().clamp(-middle, largest - middle) * scales[:, g_idx]
        if first_version:
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=GROUP))
        return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, meant

    return quantise


@pytest.mark.parametrize(("bits", "version"), [(4, "gptq"), (4, "gptq_v2"), (8, "gptq_v2")])
def test_gptq(tmp_path: Path, bits: int, version: str) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "checkpoint_format": version}
    quantise = quantise_with_gptqmodel(bits, None, version == "gptq")
    meant = write_quantized(tmp_path / "t", config, quantise, torch.float16)
    bundle = build_and_compare(tmp_path / "t", meant, "fp32", "GPTQ")
    assert all(facts.zero_points is None for facts in bundle.manifest.quantized.values())


def test_gptq_with_act_order_is_refused_by_name(tmp_path: Path) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"}
    write_quantized(tmp_path / "t", config, quantise_with_gptqmodel(4, order, False), torch.float16)
    with pytest.raises(CheckpointError, match=r"_proj is quantised with act-order \(desc_act.*desc_act false"):
        build(BuildOptions(str(tmp_path / "t")), tmp_path / "b", "none", quiet)


def test_modelopt(tmp_path: Path) -> None:
    quantization = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    write_target(tmp_path / "t", "llama", dtype=torch.bfloat16, hidden_size=256, intermediate_size=256, head_dim=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.bfloat16)
    model = quantization.quantize(model, quantization.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, lambda one: None)
    with torch.no_grad():
        meant = {
            f"{name}.weight": module.weight_quantizer(module.weight.float())
            for name, module in model.named_modules()
            if name.endswith("_proj")
        }
    export_hf_checkpoint(model, export_dir=tmp_path / "q")
    build(BuildOptions(str(tmp_path / "q"), precision="fp32"), tmp_path / "bundle", "ort-cpu", quiet)
    bundle = Bundle.open(tmp_path / "bundle")
    for name, expected in meant.items():
        found = read_float_weight(bundle.path, bundle.manifest, name)
        # The library fakes quantisation in fp32 and rounds what it writes from bf16: ties may fall to the other side.
        apart = (found - expected).abs() > 1e-2 * expected.abs() + 1e-4
        assert apart.float().mean() < 1e-3, name


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path / "t", "llama")
    for config, message in (
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\); taken as they are: awq, compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's NVFP4 is not taken"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4}, "holds no weight of that format"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
         "quantises activations too"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "quantises its KV cache too"),
    ):  # fmt: skip
        edit_json(tmp_path / "t" / "config.json", quantization_config=config)
        with pytest.raises(CheckpointError, match=message):
            build(BuildOptions(str(tmp_path / "t")), tmp_path / "b", "none", quiet)
