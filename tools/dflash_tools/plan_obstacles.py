"""What TensorRT takes on no board, or not on this one, said before a plan's sums mean anything."""

from __future__ import annotations

from dflash_tools.device_table import Device
from dflash_tools.model_shape import Matrix, WeightForm
from dflash_tools.plan_options import PlanOptions
from dflash_tools.plan_sources import Pair
from dflash_tools.weight_bytes import every_form

FLOAT8_SM = 89


def find_obstacles(pair: Pair, device: Device, options: PlanOptions) -> tuple[str, ...]:
    """What TensorRT does not take, on any board or on this one, as the builder would refuse it."""
    from dflash_engines.tensorrt_versions import lacks_kernels

    target, weights = pair.target, all_weights(pair, options)
    found = [lacks_kernels("tensorrt", options.tensorrt, divmod(device.sm, 10))]
    if options.form == "primitive" and any(form.kind == "int4" for _, form in weights):
        found.append(f"TensorRT {options.tensorrt} takes no int4; 10.15 (JetPack 7.2) and later do")
    found += [_obstacle(matrix, form, device) for matrix, form in weights]
    fuse = pair.drafter.fuse.form
    if fuse is not None and not fuse.symmetric:
        found.append("the drafter's fusing matrix has zero points and is used in fp32, for which TensorRT has no form")
    if not target.head_elements:
        kind = (target.head_form or WeightForm(options.table_precision)).kind
        if kind in ("int4", "fp8"):
            found.append(f"the head is the embedding too, and TensorRT picks no rows from a table in {kind}")
    return tuple(dict.fromkeys(reason for reason in found if reason))


def all_weights(pair: Pair, options: PlanOptions) -> list[tuple[Matrix, WeightForm]]:
    """Every matrix of the pair, and how it is stored."""
    own, fuse = options.drafter_storage, pair.drafter.fuse
    body = every_form(pair.drafter.body, own)
    return [*every_form(pair.target, options.storage), *body, (fuse, own.form(fuse, own.matrices))]


def _obstacle(matrix: Matrix, form: WeightForm, device: Device) -> str | None:
    if form.kind == "fp8" and device.sm < FLOAT8_SM:
        return f"TensorRT takes fp8 from SM {FLOAT8_SM} on, and this is SM {device.sm}"
    if form.kind == "int8" and form.group_size is not None:
        return f"TensorRT takes int8 with one scale an output, and the checkpoint has one for {form.group_size} inputs"
    if form.group_size is not None and matrix.columns % form.group_size:
        return f"groups of {form.group_size} do not divide the {matrix.columns} inputs of a matrix"
    return None
