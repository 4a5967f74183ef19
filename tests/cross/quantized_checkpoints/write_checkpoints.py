"""Writes the tiny quantised checkpoints of this folder, each with the library its format belongs to.

    python -m venv env && . env/bin/activate
    pip install transformers==5.24.0 compressed-tensors==0.20.1 nvidia-modelopt==0.47.0 requests accelerate
    pip install --no-deps autoawq==0.2.9 gptqmodel==7.7.0 torchao datasets
    pip install tokenicer logbar device-smi pypcre threadpoolctl protobuf pillow defuser dill
    TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 python tests/cross/quantized_checkpoints/write_checkpoints.py [NAME]...

Of autoawq and gptqmodel only the modules that pack weights are imported: as packages they want a GPU's libraries.
Beside each checkpoint lies `meant.json`: the library with its version, and of every quantised weight the hash of the
floats that the library itself makes of it, in the dtype it makes them in.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from tiny_models import write_drafter, write_target  # noqa: E402

GROUP = 32
TARGET: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 272, "tie_word_embeddings": True,
}  # fmt: skip
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""A matrix [out, in] -> the tensors the format stores under the module's name, and the weights it means."""


def hash_of(weight: Tensor) -> str:
    """Of the values; there is one zero."""
    return hashlib.sha256((weight + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def write_meant(folder: Path, library: str, meant: dict[str, Tensor]) -> None:
    """What the library says its weights are."""
    weights = {name: [str(w.dtype).removeprefix("torch."), hash_of(w)] for name, w in sorted(meant.items())}
    facts = {"library": f"{library} {importlib.metadata.version(library)}", "weights": weights}
    (folder / "meant.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def quantise_folder(folder: Path, config: dict[str, Any], quantise: Quantise, library: str, *ends: str) -> None:
    """Puts quantised weights in the place of the matrices of a checkpoint whose names end so."""
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(tuple(f"{end}.weight" for end in ends))]:
        stored, meant[name] = quantise(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": config}, indent=1) + "\n")
    write_meant(folder, library, meant)


def target(dtype: torch.dtype, config: dict[str, Any], quantise: Quantise, library: str) -> Callable[[Path], None]:
    """A writer of a tiny Llama whose layers are quantised."""

    def write(folder: Path) -> None:
        write_target(folder, "llama", dtype=dtype, tokenizer=False, **TARGET)
        quantise_folder(folder, config, quantise, library, "_proj")

    return write


def drafter(dtype: torch.dtype, config: dict[str, Any], quantise: Quantise, library: str, *ends: str
            ) -> Callable[[Path], None]:  # fmt: skip
    """A writer of a tiny drafter in z-lab's format for a target of four layers, its matrices quantised."""

    def write(folder: Path) -> None:
        write_drafter(folder, layers=1, taps=(0, 2), block_size=4, dtype=dtype)
        quantise_folder(folder, config, quantise, library, *ends)

    return write


def compressed_tensors(args: dict[str, Any], kind: str, actorder: bool = False) -> Quantise:
    """compressed-tensors: its own scales, its own packing, its own way back."""

    def quantise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from compressed_tensors import compressors
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        made = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=made)
        compressor = getattr(compressors, kind)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        g_idx = torch.empty_like(order)
        g_idx[order] = torch.arange(weight.shape[1]) // GROUP
        ranged = weight[:, order] if actorder else weight
        width = {"group": GROUP, "channel": weight.shape[1]}.get(args["strategy"])
        rows = ranged.reshape(1, -1) if width is None else ranged.reshape(len(weight), -1, width)
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), made)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        if not args["symmetric"]:
            state["weight_zero_point"] = zero.to(torch.int8)
        if actorder:
            state["weight_g_idx"] = g_idx.to(torch.int32)
        stored = compressor.compress(state, scheme)
        meant = compressor.decompress(dict(stored), scheme)["weight"]
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}, meant

    return quantise


def compressed_tensors_config(args: dict[str, Any], form: str, activations: dict[str, Any] | None = None
                              ) -> dict[str, Any]:  # fmt: skip
    """What llm-compressor writes into config.json."""
    group = {"targets": ["Linear"], "weights": {"actorder": None, **args}, "input_activations": activations,
             "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


@functools.cache
def from_package_file(package: str, path: str) -> Any:
    """A module of an installed package without what the package's own `__init__` would import."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    root = Path(next(iter(found.submodule_search_locations)))
    parts = path.split(".")
    names = [package, *(f"{package}.{'.'.join(parts[: i + 1])}" for i in range(len(parts)))]
    for name in names[:-1]:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]  # type: ignore[attr-defined]
            sys.modules[name] = module
    return importlib.import_module(names[-1])


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoAWQ: its packing and its way back; scales of the plain kind."""
    gemm = from_package_file("awq", "modules.linear.gemm")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = ((groups.amax(-1) - groups.amin(-1)).clamp(min=1e-5) / 15).half().float()
    zeros = (-(groups.amin(-1) / scales).round()).clamp(0, 15)
    with torch.no_grad():
        linear.weight.copy_(weight.float())
        packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.T.contiguous(), zeros.T.contiguous())
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return stored, gemm.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T.contiguous()


def gptq(bits: int, symmetric: bool, act_order: bool, first_version: bool) -> Quantise:
    """GPTQModel: its packing, its conversion to the first version of the format, and its way back."""

    def quantise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.quantization import QuantizeConfig
        from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

        rows, columns = weight.shape
        g_idx = torch.arange(columns) // GROUP
        if act_order:
            g_idx = g_idx[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight.float()
        groups = [weight.float()[:, g_idx == g] for g in range(columns // GROUP)]
        low = torch.stack([one.amin(-1).clamp(max=0) for one in groups], dim=1)
        high = torch.stack([one.amax(-1).clamp(min=0) for one in groups], dim=1)
        middle, largest = 2 ** (bits - 1), 2**bits - 1
        if symmetric:
            scales = (torch.maximum(-low, high) / (middle - 1)).half().float()
            zeros = torch.full_like(scales, middle)
        else:
            scales = ((high - low) / largest).half().float()
            zeros = (-low / scales).round().clamp(1, largest)
        packed = TorchLinear(bits, GROUP, symmetric, act_order, columns, rows, False)
        packed.pack_original(linear, scales, zeros, g_idx.to(torch.int32))
        packed.post_init()
        meant = packed.dequantize_weight().T.contiguous()
        if first_version:
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=GROUP))
        return {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}, meant

    return quantise


def gptq_config(bits: int, symmetric: bool, act_order: bool, version: str) -> dict[str, Any]:
    """What GPTQModel writes into config.json."""
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order,
        "checkpoint_format": version,
    }  # fmt: skip


def modelopt_model(folder: Path) -> Any:
    """A tiny Llama in bf16 that int4 in groups of 128 holds exactly: steps of -7 to 7, each group with a 7."""
    from transformers import AutoModelForCausalLM

    sizes = {**TARGET, "hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    write_target(folder, "llama", dtype=torch.bfloat16, tokenizer=False, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            steps = torch.randint(-7, 8, weight.shape, generator=generator)
            steps[:, 17] = 7
            scales = torch.randint(16, 32, (len(weight), 1), generator=generator) / 512
            weight.data.copy_(steps * scales)
    return model


def write_modelopt_int4(folder: Path) -> None:
    """ModelOpt: a whole model, quantised and exported; it has no way back from what it exports, so none is needed."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    with tempfile.TemporaryDirectory() as plain:
        model = modelopt_model(Path(plain))
        exact = {n: w.detach().clone() for n, w in model.named_parameters() if n.endswith("_proj.weight")}
        model = mtq.quantize(model, mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, lambda one: None)
        for name, module in model.named_modules():
            if f"{name}.weight" in exact:
                found = module.weight_quantizer(module.weight.float()).bfloat16()
                assert torch.equal(found, exact[f"{name}.weight"])
        export_hf_checkpoint(model, export_dir=folder)
    write_meant(folder, "nvidia-modelopt", exact)


def write_modelopt_fp8(folder: Path, recipe: str = "FP8_DEFAULT_CFG", cache: str | None = None) -> None:
    """ModelOpt: a scale a matrix or a row, and its own way back from what it exports."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor

    with tempfile.TemporaryDirectory() as plain:
        model = modelopt_model(Path(plain))
        ids, made_for = torch.arange(3, 40)[None], getattr(mtq, recipe)
        if cache is not None:
            made_for = {**made_for, "quant_cfg": [*made_for["quant_cfg"], *getattr(mtq, cache)["quant_cfg"]]}
        export_hf_checkpoint(mtq.quantize(model, made_for, lambda one: one(ids)), export_dir=folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        made, scale = FP8QTensor(tensors[name].shape, torch.float32, tensors[name]), tensors[f"{name}_scale"].float()
        meant[name] = made.dequantize(torch.float32, scale=scale if scale.dim() == 0 else scale.reshape(-1, 1))
    write_meant(folder, "nvidia-modelopt", meant)


def write_modelopt_fp8_of_old(folder: Path) -> None:
    """What ModelOpt wrote until 2025, and many published checkpoints hold: the facts in a file of their own alone."""
    write_modelopt_fp8(folder, cache="FP8_KV_CFG")
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del facts["quantization_config"]
    (folder / "config.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    assert (folder / "hf_quant_config.json").is_file()


def ct_args(bits: int = 4, symmetric: bool = True, strategy: str = "group", kind: str = "int") -> dict[str, Any]:
    """Arguments of compressed-tensors for weights."""
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy,
            "group_size": GROUP if strategy == "group" else None}  # fmt: skip


PACKED, PLAIN, FLOATS = "PackedQuantizationCompressor", "IntQuantizationCompressor", "FloatQuantizationCompressor"
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
CT, BF16, FP16 = "compressed-tensors", torch.bfloat16, torch.float16
PROJECTIONS = ("_proj",)
_A, _ASYM, _W8 = ct_args(), ct_args(symmetric=False), ct_args(8, strategy="channel")
_W8A, _FP8 = ct_args(8, False, "channel"), ct_args(8, strategy="channel", kind="float")
_FP8T, _ORDER = ct_args(8, strategy="tensor", kind="float"), {**ct_args(), "actorder": "group"}
_STATIC = {**ct_args(), "actorder": "weight"}

WRITERS: dict[str, Callable[[Path], None]] = {
    "ct-int4": target(BF16, compressed_tensors_config(_A, "pack-quantized"), compressed_tensors(_A, PACKED), CT),
    "ct-int4-asymmetric": target(
        BF16, compressed_tensors_config(_ASYM, "pack-quantized"), compressed_tensors(_ASYM, PACKED), CT
    ),
    "ct-int8": target(BF16, compressed_tensors_config(_W8, "int-quantized"), compressed_tensors(_W8, PLAIN), CT),
    "ct-int8-asymmetric": target(
        BF16, compressed_tensors_config(_W8A, "pack-quantized"), compressed_tensors(_W8A, PACKED), CT
    ),
    "ct-act-order": target(
        BF16, compressed_tensors_config(_ORDER, "pack-quantized"), compressed_tensors(ct_args(), PACKED, True), CT
    ),
    "ct-act-order-weight": target(
        BF16, compressed_tensors_config(_STATIC, "pack-quantized"), compressed_tensors(_STATIC, PACKED), CT
    ),
    "ct-fp8": target(
        BF16, compressed_tensors_config(_FP8, "float-quantized", DYNAMIC), compressed_tensors(_FP8, FLOATS), CT
    ),
    "ct-fp8-tensor": target(
        BF16, compressed_tensors_config(_FP8T, "float-quantized"), compressed_tensors(_FP8T, FLOATS), CT
    ),
    "awq": target(
        FP16, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq,
        "autoawq",
    ),
    "gptq": target(FP16, gptq_config(4, True, False, "gptq"), gptq(4, True, False, True), "gptqmodel"),
    "gptq-int8-asymmetric": target(
        FP16, gptq_config(8, False, False, "gptq_v2"), gptq(8, False, False, False), "gptqmodel"
    ),
    "gptq-act-order": target(FP16, gptq_config(4, True, True, "gptq_v2"), gptq(4, True, True, False), "gptqmodel"),
    "gptq-static-groups": target(
        FP16, {**gptq_config(4, True, True, "gptq"), "static_groups": True}, gptq(4, True, False, True), "gptqmodel"
    ),
    "modelopt-int4": write_modelopt_int4,
    "modelopt-fp8": write_modelopt_fp8,
    "modelopt-fp8-channel": functools.partial(write_modelopt_fp8, recipe="FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "modelopt-fp8-kv": write_modelopt_fp8_of_old,
    "drafter-ct-int4": drafter(
        BF16, compressed_tensors_config(_ASYM, "pack-quantized"), compressed_tensors(_ASYM, PACKED), CT, "_proj", "fc"
    ),
    "drafter-awq": drafter(
        FP16, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq,
        "autoawq", "_proj",
    ),
    "drafter-gptq": drafter(
        FP16, gptq_config(4, True, False, "gptq"), gptq(4, True, False, True), "gptqmodel", "_proj"
    ),
    "drafter-ct-fp8": drafter(
        BF16, compressed_tensors_config(_FP8, "float-quantized", DYNAMIC), compressed_tensors(_FP8, FLOATS), CT, "_proj"
    ),
}  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:] or WRITERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        WRITERS[name](HERE / name)
        size = sum(path.stat().st_size for path in (HERE / name).iterdir())
        print(name, f"{size} bytes", json.loads((HERE / name / "meant.json").read_text())["library"])
