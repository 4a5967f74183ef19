"""A pair's checkpoints as PyTorch modules that hold the weights of their bundle: rounded and quantised as it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from dflash_export.checkpoint import Checkpoint, read_target_config
from dflash_export.drafter import Drafter
from dflash_export.drafter_build import DrafterPlan
from dflash_export.drafter_weights import (
    EMBEDDING,
    HEAD,
    PREFIX,
    DrafterWeights,
    load_drafter,
    quantized_parameters,
    read_tensor,
    set_parameter,
)
from dflash_export.match_weights import untie_if_stored_apart
from dflash_export.meant_weights import MeantWeights, meant_weights, target_places
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.reference_run import TargetReference
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_runtime.bundle import Manifest
from dflash_tools.reference_record import INT8_PRODUCTS
from dflash_tools.torch_int8_products import activation_blocks
from dflash_tools.torch_oracle import TorchOracle


@dataclasses.dataclass(frozen=True)
class PairSource:
    """What a bundle was made from."""

    manifest: Manifest
    target: Checkpoint
    """Weights that others have quantised stand under their plain names."""
    drafter: DrafterPlan | None
    tap_layer_ids: list[int]

    def load(self, precision: str) -> TorchOracle:
        """Loads both models.

        Args:
            precision: What is computed in: fp32, a half precision, or `int8 products`, which is fp32 with the
                activations of quantised products rounded to int8. In fp32 weights are those of the bundle, rounded to
                its precision; in half precision all are rounded to that.
        """
        exact = precision in ("fp32", INT8_PRODUCTS)
        dtype = _dtype(self.manifest.precision if exact else precision)
        target, meant = self._target(dtype)
        if exact:
            target.model.float()
        final = torch.float32 if exact else dtype
        if meant is not None:
            _put(dict(target.model.named_parameters()), meant, final)
        tables = self._tables()
        module = None if self.drafter is None else self._drafter(self.drafter, target.model, meant, dtype, final)
        computed = "fp32" if exact else precision
        oracle = TorchOracle(target, self.tap_layer_ids, module, computed, tables[0].removesuffix(".weight"))
        if precision == INT8_PRODUCTS:
            shapes = {name: self.manifest.weights[name].shape for name in self.manifest.quantized}
            oracle.round_activations(activation_blocks(self.manifest.quantized, shapes), tables)
        return oracle

    def _target(self, dtype: torch.dtype) -> tuple[TargetReference, MeantWeights | None]:
        manifest, places = self.manifest, self.target.places
        imported = any(isinstance(place, ImportedPlace) for place in places.values())
        if imported:
            config = read_target_config(self.target, quantized=True)
            untie_if_stored_apart(config, places)
            reference = TargetReference.hollow(config, dtype)
        else:
            reference = TargetReference.load(self.target.folder, dtype)
        if not manifest.quantized:
            return reference, None
        found = target_places(reference.model, manifest.weights, places)
        if imported:
            _fill(reference.model, found)
        if self.drafter is not None:
            found |= self.drafter.weights.bundle_places
        return reference, meant_weights(manifest, found)

    def _drafter(
        self, plan: DrafterPlan, target: nn.Module, meant: MeantWeights | None, dtype: torch.dtype, final: torch.dtype
    ) -> Drafter:
        table, head = (one.weight for one in (target.get_input_embeddings(), target.get_output_embeddings()))  # type: ignore[operator]
        drafter = load_drafter(plan.config, self._own_weights(plan), table, head, dtype, final)
        if meant is not None:
            for parameter, name in quantized_parameters(meant.quantized, self._tables()).items():
                value = meant.value(name).to(final)
                set_parameter(drafter, parameter, nn.Parameter(value, requires_grad=False))
        return drafter

    def _own_weights(self, plan: DrafterPlan) -> DrafterWeights:
        """Without copies of the target's tables, which a build leaves out; quantised ones look different."""
        target, weights = self.manifest.target, self.manifest.weights
        tables = {EMBEDDING: target.embedding_weight, HEAD: target.head_weight}
        copies = {
            name for name, table in tables.items() if table in self.manifest.quantized and PREFIX + name not in weights
        }
        kept = {name: place for name, place in plan.weights.places.items() if name not in copies}
        return dataclasses.replace(plan.weights, places=kept)

    def _tables(self) -> tuple[str, str]:
        target = self.manifest.target
        names = target.embedding_weight, target.head_weight
        return names if self.drafter is None else self._own_weights(self.drafter).table_names(*names)


def _dtype(precision: str) -> torch.dtype:
    return TORCH_DTYPES[PRECISIONS[precision]]


@torch.no_grad()
def _put(parameters: Mapping[str, nn.Parameter], meant: MeantWeights, dtype: torch.dtype) -> None:
    for name in meant.quantized:
        if name in parameters:
            parameters[name].copy_(meant.value(name).to(dtype))


@torch.no_grad()
def _fill(module: nn.Module, places: Mapping[str, TensorPlace]) -> None:
    """Gives a module the plain tensors of a checkpoint that Transformers itself may not load."""
    state = module.state_dict(keep_vars=True)
    for name, place in places.items():
        if not isinstance(place, ImportedPlace):
            state[name].copy_(read_tensor(place))
