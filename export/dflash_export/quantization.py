"""What a build quantises, and how: a scheme for the layers, one for the head, one for the drafter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from dflash_runtime.errors import CheckpointError

GROUP_SIZES = (32, 64, 128)
# Which expert a token goes to is decided by a small matrix, and decided wrongly by a rounded one.
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)\.weight$")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a weight becomes small integers."""

    bits: int
    """8: one scale a row; 4: one scale for every `group_size` inputs."""
    group_size: int | None
    symmetric: bool = True
    floating: bool = False
    """Floats of 8 bits (e4m3) instead of integers."""

    @property
    def words(self) -> str:
        """The scheme as a person says it."""
        grouped = "per channel" if self.group_size is None else f"group {self.group_size}"
        if self.floating:
            return f"fp{self.bits} {grouped}"
        return f"int{self.bits} {grouped} {'symmetric' if self.symmetric else 'asymmetric'}"


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """What the user asks for; None keeps weights in the bundle's precision."""

    layers: Scheme | None = None
    """The matrices of the target's layers."""
    head: Scheme | None = None
    """The output head, and with a tied one the embedding table."""
    drafter: Scheme | None = None
    """The drafter's own matrices."""

    @property
    def wanted(self) -> bool:
        """Whether anything is quantised."""
        return any((self.layers, self.head, self.drafter))


def make_scheme(kind: str | None, group_size: int = 32, *, symmetric: bool = True) -> Scheme | None:
    """A scheme by its name on the command line.

    Args:
        kind: `int4`, `int8`, `fp8`, or `keep` (also None).
        group_size: For int4.
        symmetric: For int4.

    Raises:
        CheckpointError: another kind or group size, or zero points with 8 bits.
    """
    if kind in (None, "keep"):
        return None
    if kind in ("int8", "fp8"):
        if not symmetric:
            raise CheckpointError(f"{kind} weights are symmetric: one scale a channel needs no zero point. Use int4.")
        return Scheme(8, None, floating=kind == "fp8")
    if kind != "int4":
        raise CheckpointError(f"{kind!r} is no kind of weights; known are int4, int8, fp8 and keep.")
    if group_size not in GROUP_SIZES:
        raise CheckpointError(f"a group of {group_size} inputs has no kernels; give one of {GROUP_SIZES}.")
    return Scheme(4, group_size, symmetric)


def quantize_options(
    layers: str, head: str, drafter: str, group_size: int = 32, *, symmetric: bool = True
) -> QuantizeOptions:
    """What a command line asks for: `keep`, `int8`, `int4` or `fp8` for layers, head and drafter.

    Raises:
        CheckpointError: a scheme that does not exist, or zero points where nothing is int4.
    """
    kinds = (layers, head, drafter)
    if not symmetric and "int4" not in kinds:
        raise CheckpointError("--asymmetric is for int4, and nothing shall be int4. Give --quantize int4, or leave it.")
    return QuantizeOptions(*(make_scheme(kind, group_size, symmetric=symmetric or kind != "int4") for kind in kinds))


def choose_schemes(
    linear: Collection[str], tables: Collection[str], options: QuantizeOptions
) -> tuple[dict[str, Scheme], list[str]]:
    """The scheme of every matrix of a target that shall be quantised.

    Args:
        linear: Names of the matrices [out, in] that products read.
        tables: Names of embedding and head.
        options: What the user asks for.

    Returns:
        The schemes by name, and notes for the user.

    Raises:
        CheckpointError: something was asked for that nothing in the model answers to.
    """
    chosen: dict[str, Scheme] = {}
    for name in linear:
        scheme = options.head if name in tables else options.layers
        if scheme is not None and not _ROUTER.search(name):
            chosen[name] = scheme
    notes = []
    if options.layers is not None and not chosen.keys() - set(tables):
        raise CheckpointError("the model's layers hold no plain matrix [out, in], so there is nothing to quantise.")
    if options.head is not None and not chosen.keys() & set(tables):
        raise CheckpointError("the model's output head is no plain matrix [out, in]; leave --quantize-head at keep.")
    routers = [name for name in linear if options.layers is not None and _ROUTER.search(name)]
    if routers:
        notes.append(f"{len(routers)} router matrices keep the bundle's precision")
    return chosen, notes


def require_whole_groups(name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
    """Refuses a group size that does not divide the inputs of a matrix.

    Raises:
        CheckpointError: naming the matrix and the sizes that work.
    """
    columns, group = shape[-1], scheme.group_size
    if group is not None and columns % group:
        fitting = [size for size in GROUP_SIZES if columns % size == 0]
        hint = f"Give --group-size {' or '.join(map(str, fitting))}" if fitting else "Use int8"
        raise CheckpointError(f"{name} has {columns} inputs, which groups of {group} do not divide. {hint}.")
