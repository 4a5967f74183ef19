"""What `quantization_config` of a checkpoint says of its weights, module by module, without a look at them.

The kinds are those a build takes as they are; others are refused by name here too. Keys are those of AutoAWQ,
GPTQModel, compressed-tensors and ModelOpt.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dflash_runtime.errors import CheckpointError
from dflash_tools.model_shape import Matrix, WeightForm

HEAD = "lm_head"
_MODELOPT_GROUP = 128
_INT4_GROUPS = (16, 32, 64, 128, 256)
_REPEATED_GROUPS = (128, 64, 32)
"""One int4 scale an output is repeated for groups of the first of these that divides its inputs: kernels want some."""
_MODELOPT = {"W4A16_AWQ": "int4", "W4A16": "int4", "INT4_AWQ": "int4", "FP8": "fp8"}


@dataclasses.dataclass(frozen=True)
class StoredForms:
    """How a checkpoint holds its weights."""

    method: str
    of_module: Callable[[str], WeightForm | None]
    """Module's name -> its form; None for floats. A group size of None is one scale an output."""
    notes: tuple[str, ...] = ()

    def form(self, module: str, columns: int) -> WeightForm | None:
        """The form a bundle has a weight in.

        Raises:
            CheckpointError: int4 in groups that no kernel takes.
        """
        form = self.of_module(module)
        if form is None or form.kind != "int4":
            return form
        group = form.group_size or next((size for size in _REPEATED_GROUPS if columns % size == 0), None)
        if group not in _INT4_GROUPS or columns % group:
            raise CheckpointError(f"{module} is int4 in groups of {group} over {columns} inputs: no kernels.")
        return dataclasses.replace(form, group_size=group)


def with_forms(matrices: Iterable[Matrix], forms: StoredForms) -> tuple[Matrix, ...]:
    """The same matrices, apart where a checkpoint holds them in different forms; those without a name stay."""
    found = []
    for matrix in matrices:
        by_form: dict[WeightForm | None, int] = {}
        for name in matrix.names:
            form = forms.form(name, matrix.columns)
            by_form[form] = by_form.get(form, 0) + 1
        found += [dataclasses.replace(matrix, count=count, form=form) for form, count in by_form.items()] or [matrix]
    return tuple(found)


def read_stored_forms(config: Mapping[str, Any], where: str) -> StoredForms | None:
    """What config.json says; None for a checkpoint in floats.

    Args:
        config: Content of config.json.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: a format, or a variant of one, that a build does not take.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "unknown")) if isinstance(given, Mapping) else str(given)
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}
    if method not in readers or not isinstance(given, Mapping):
        raise CheckpointError(
            f"{where} is quantised ({method}); taken as they are: {', '.join(sorted(readers))}. Give one of these, or "
            "the original half-precision checkpoint."
        )
    return readers[method](given, where)


def _awq(config: Mapping[str, Any], where: str) -> StoredForms:
    bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"{where}: AWQ weights of {bits} bits in the layout {version!r} are not taken.")
    form = WeightForm("int4", _group(config.get("group_size")), not config.get("zero_point", True))
    kept = list(config.get("modules_to_not_convert") or ())

    def of_module(module: str) -> WeightForm | None:
        return None if not _in_layers(module) or any(part in module for part in kept) else form

    return StoredForms("awq", of_module)


def _gptq(config: Mapping[str, Any], where: str) -> StoredForms:
    rules: Mapping[str, Any] = config.get("dynamic") or {}
    inside = _flat(config.get("modules_in_block_to_quantize") or ())

    def of_module(module: str) -> WeightForm | None:
        if not (_in_layers(module) or (module == HEAD and config.get("lm_head"))):
            return None
        if inside and not any(module.endswith(name) for name in inside):
            return None
        facts = dict(config)
        for rule, changed in rules.items():
            if re.match(rule.removeprefix("+:").removeprefix("-:"), module):
                if rule.startswith("-:"):
                    return None
                facts |= changed
                break
        bits = int(facts["bits"])
        if bits not in (4, 8):
            raise CheckpointError(f"{where}: GPTQ weights of {bits} bits are not taken; 4 and 8 are.")
        return WeightForm(f"int{bits}", _group(facts.get("group_size")), bool(facts.get("sym", True)))

    act_order = "desc_act is true: a build takes it only where the inputs are in their own order all the same"
    return StoredForms("gptq", of_module, (act_order,) if config.get("desc_act") else ())


def _compressed_tensors(config: Mapping[str, Any], where: str) -> StoredForms:
    if config.get("kv_cache_scheme"):
        raise CheckpointError(f"{where} quantises its KV cache too, which is not taken; only weights are.")
    groups = [group for group in (config.get("config_groups") or {}).values() if group.get("weights")]
    forms = [(list(group.get("targets") or ["Linear"]), _scheme(group, where)) for group in groups]
    ignored = list(config.get("ignore") or ())

    def of_module(module: str) -> WeightForm | None:
        if any(_named(module, pattern) for pattern in ignored):
            return None
        return next((form for targets, form in forms if any(_named(module, one) for one in targets)), None)

    return StoredForms("compressed-tensors", of_module)


def _scheme(group: Mapping[str, Any], where: str) -> WeightForm:
    weights = group["weights"]
    bits, kind, strategy = int(weights.get("num_bits", 8)), str(weights.get("type", "int")), weights.get("strategy")
    if kind == "float":
        if bits != 8 or strategy not in (None, "tensor", "channel"):
            raise CheckpointError(
                f"{where} holds float weights of {bits} bits by {strategy}; FP8 by tensor or channel is taken."
            )
        return WeightForm("fp8")
    if group.get("input_activations") or group.get("output_activations"):
        raise CheckpointError(f"{where} quantises activations too (W8A8 or the like); give one with weights alone.")
    if bits not in (4, 8):
        raise CheckpointError(f"{where} holds weights of {bits} bits; int4, int8 and FP8 are taken.")
    return WeightForm(f"int{bits}", _group(weights.get("group_size")), bool(weights.get("symmetric", True)))


def _modelopt(config: Mapping[str, Any], where: str) -> StoredForms:
    inner = config.get("quantization") or {}
    algorithm = str(config.get("quant_algo", inner.get("quant_algo", "unknown"))).upper()
    kind = _MODELOPT.get(algorithm)
    if kind is None:
        raise CheckpointError(f"{where}: ModelOpt's {algorithm} is not taken; {', '.join(_MODELOPT)} are (int4, FP8).")
    ignored = [*(config.get("ignore") or ()), *(inner.get("exclude_modules") or config.get("exclude_modules") or ())]
    stated = [group.get("weights", {}).get("group_size") for group in (config.get("config_groups") or {}).values()]
    stated += [config.get("group_size"), inner.get("group_size")]
    group, notes = next((size for size in stated if size), None), tuple[str, ...]()
    if kind == "int4" and group is None:
        group = _MODELOPT_GROUP
        notes = (f"config.json states no group size; ModelOpt's own {_MODELOPT_GROUP} is taken",)
    form = WeightForm(kind, group if kind == "int4" else None)

    def of_module(module: str) -> WeightForm | None:
        kept = any(fnmatch.fnmatch(module, one) or module.startswith(f"{one}.") for one in ignored)
        return None if kept else form

    return StoredForms("modelopt", of_module, notes)


def _group(size: int | None) -> int | None:
    """Some say -1 for one scale an output."""
    return size if size is not None and size > 0 else None


def _in_layers(module: str) -> bool:
    return "layers." in module


def _flat(names: Sequence[Any]) -> list[str]:
    """A list of names, or of lists of names."""
    return [name for entry in names for name in ([entry] if isinstance(entry, str) else entry)]


def _named(module: str, pattern: str) -> bool:
    """compressed-tensors: a class of modules, a name, or a regular expression from the name's beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in ("Linear", module)
