"""The drafter's tensors: which ones a config asks for, where they lie, and a drafter filled with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from dflash_export.draft_vocabulary import MAPPING, read_target_ids
from dflash_export.drafter import Drafter
from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_kinds import DFLASH2_ARCHITECTURE, refuse_foreign_tensors
from dflash_export.drafter_layouts import layout_named
from dflash_export.read_on_use import LARGE_ELEMENTS, ReadOnUse
from dflash_export.tensor_files import FLOAT_DTYPES, TensorPlace
from dflash_export.weight_store import TORCH_DTYPES
from dflash_export.weight_values import read_converted
from dflash_runtime.errors import CheckpointError

PREFIX = "drafter."
"""Weights of the drafter's own are called this and their checkpoint name in the bundle."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""Tables of DFlash 2 with a row for every token of the vocabulary."""
_OF_DFLASH2 = ("attention_conv.", "mlp_conv.", "candidate_selector.")


@dataclasses.dataclass(frozen=True)
class DrafterWeights:
    """The drafter's own tensors, by the authors' names."""

    places: dict[str, TensorPlace]
    vocab_size: int
    target_ids: Tensor | None = None
    """The target's id of each row of a head over part of the vocabulary, int64."""
    ignored: tuple[str, ...] = ()
    """Tensors of the checkpoint that only training needs, or that the target has too."""

    @property
    def bundle_places(self) -> dict[str, TensorPlace]:
        """The same by their names in the bundle."""
        return {PREFIX + name: place for name, place in self.places.items()}

    def table_names(self, target_embedding: str, target_head: str) -> tuple[str, str]:
        """Bundle names of embedding and head: the drafter's own where it has them, else the target's."""
        return (
            PREFIX + EMBEDDING if EMBEDDING in self.places else target_embedding,
            PREFIX + HEAD if HEAD in self.places else target_head,
        )


def quantized_parameters(quantized: Collection[str], tables: tuple[str, str]) -> dict[str, str]:
    """The drafter's parameters that a bundle holds quantised, the borrowed ones included.

    Args:
        quantized: Names of the bundle's quantised weights.
        tables: Its names of the embedding and the head the drafter uses.

    Returns:
        Parameter -> name in the bundle.
    """
    own = {name.removeprefix(PREFIX): name for name in quantized if name.startswith(PREFIX)}
    borrowed = zip((EMBEDDING, HEAD), tables, strict=True)
    return {**own, **{parameter: name for parameter, name in borrowed if name in quantized}}


def drafter_shapes(config: DrafterConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every parameter of a drafter, embedding and head included, with its shape."""
    with torch.device("meta"):
        drafter = Drafter(config, vocab_size)
    return {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}


def match_drafter_weights(
    config: DrafterConfig, places: Mapping[str, TensorPlace], vocab_size: int, where: str
) -> DrafterWeights:
    """Finds every tensor the config asks for, and accounts for every tensor of the checkpoint.

    Args:
        config: The drafter's facts.
        places: What the checkpoint holds; names may start with `model.`.
        vocab_size: Rows of the target's embedding.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: tensors missing, left over, or of another shape; all are named. A draft vocabulary without a
            sound mapping.
        UnsupportedModelError: tensors of another kind of drafter.
    """
    layout = layout_named(config.layout)
    bare = {name.removeprefix("model."): place for name, place in places.items() if "rotary_emb." not in name}
    ignored = tuple(sorted(bare.keys() & layout.of_training))
    found = {layout.renamed.get(name, name): place for name, place in bare.items() if name not in ignored}
    if not found:
        raise CheckpointError(f"{where} holds no tensors. Download the checkpoint again.")
    refuse_foreign_tensors(found, where)
    wanted = drafter_shapes(config, vocab_size)
    target_ids = None
    if config.draft_vocab_size is not None:
        target_ids = read_target_ids(found, config.draft_vocab_size, vocab_size, where)
        found = {name: place for name, place in found.items() if name not in MAPPING}
    for name in (EMBEDDING, HEAD):
        if name not in found:
            if name == EMBEDDING or target_ids is None:
                del wanted[name]
        elif found[name].shape != wanted[name]:
            raise CheckpointError(
                f"{where} holds {name} of shape {list(found[name].shape)}, and its config and target ask for "
                f"{list(wanted[name])}. A head over part of the vocabulary needs draft_vocab_size in the config and "
                "the tensor d2t."
            )
    missing, left = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(wanted)} tensors its config asks for: {', '.join(missing)}. "
            "Download it again, or its config belongs to other weights."
        )
    if left:
        raise CheckpointError(
            f"{where} holds {len(left)} tensors its config does not ask for: {', '.join(left)}. "
            f"{_why_left(config, left)}"
        )
    wrong = [
        f"{name} is {list(found[name].shape)} and should be {list(shape)}"
        for name, shape in wanted.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{where} does not fit its config: {'; '.join(wrong)}.")
    return DrafterWeights({name: found[name] for name in wanted}, vocab_size, target_ids, ignored)


def _why_left(config: DrafterConfig, left: list[str]) -> str:
    if config.dflash2 is None and any(part in name for name in left for part in _OF_DFLASH2):
        return (
            f"They belong to DFlash 2, and the config describes plain DFlash: it should name {DFLASH2_ARCHITECTURE} "
            "and state the sizes of its convolutions and its selector."
        )
    if set(left) & set(MAPPING):
        return "They map a vocabulary of the drafter's own, and the config states no draft_vocab_size for it."
    return "Its config belongs to other weights, or it is another kind of drafter."


def borrow_equal_tables(
    weights: DrafterWeights, embedding: TensorPlace | None, head: TensorPlace | None
) -> DrafterWeights:
    """Leaves out embedding and head that are copies of the target's: some tools store them with the drafter.

    Args:
        weights: The drafter's own tensors.
        embedding: The target's table, where it is at hand.
        head: The target's output head, likewise.
    """
    tables = ((EMBEDDING, embedding), (HEAD, head))
    copies = [name for name, table in tables if table is not None and _equal(weights.places.get(name), table)]
    places = {name: place for name, place in weights.places.items() if name not in copies}
    return dataclasses.replace(weights, places=places, ignored=(*weights.ignored, *copies))


def _equal(one: TensorPlace | None, two: TensorPlace) -> bool:
    if one is None or one.dtype not in FLOAT_DTYPES or (one.dtype, one.shape) != (two.dtype, two.shape):
        return False  # a quantised table is more than its values
    return all(a == b for a, b in zip(one.chunks(), two.chunks(), strict=True))


def load_drafter(
    config: DrafterConfig, weights: DrafterWeights, embedding: Tensor, head: Tensor, *dtypes: torch.dtype
) -> Drafter:
    """A drafter with real weights, for reference runs; large ones are read when they are used.

    Args:
        config: Its facts.
        weights: Its own tensors.
        embedding: The target's raw table [V, H], used unless the drafter has one of its own.
        head: The target's output head [V, H], likewise.
        dtypes: What all parameters are converted to, one after the other; the last is that of the run.
    """
    with torch.device("meta"):
        drafter = Drafter(config, weights.vocab_size)
    borrowed = {EMBEDDING: embedding, HEAD: head}
    for name in [name for name, _ in drafter.named_parameters()]:
        place = weights.places.get(name)
        if place is not None and math.prod(place.shape) >= LARGE_ELEMENTS:
            _put_on_use(drafter, name, place, dtypes)
            continue
        tensor = borrowed[name] if place is None else read_tensor(place)
        for dtype in dtypes:
            tensor = tensor.to(dtype)
        set_parameter(drafter, name, nn.Parameter(tensor, requires_grad=False))
    drafter.target_ids = weights.target_ids
    return drafter.eval()


def _put_on_use(drafter: nn.Module, name: str, place: TensorPlace, dtypes: tuple[torch.dtype, ...]) -> None:
    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(place.shape[0])
        return read_converted(place.rows(start, stop), *dtypes)

    path, _, leaf = name.rpartition(".")
    # Made into an nn.Parameter it would be read at once.
    drafter.get_submodule(path)._parameters[leaf] = ReadOnUse(place.shape, dtypes[-1], read)  # type: ignore[assignment]


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts a parameter in the place of the one of that name."""
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path).register_parameter(leaf, parameter)


def read_tensor(place: TensorPlace) -> Tensor:
    """One tensor of a safetensors file.

    Raises:
        CheckpointError: it is not of a plain floating-point dtype, or the file ends early.
    """
    dtype = TORCH_DTYPES.get(place.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{place.file} holds tensors of {place.dtype}; give a checkpoint in {', '.join(TORCH_DTYPES)}."
        )
    data = bytearray(place.length_bytes)
    offset = 0
    for piece in place.chunks():
        data[offset : offset + len(piece)] = piece
        offset += len(piece)
    return torch.frombuffer(data, dtype=dtype).reshape(place.shape)
