"""Traces the drafter's two graphs to ONNX without its weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_export.drafter import Drafter
from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_weights import EMBEDDING, HEAD, PREFIX, set_parameter
from dflash_export.graph_cleanup import clean_graph
from dflash_export.graph_facts import state_pairs
from dflash_export.target_trace import export_quietly, refusing_by_name
from dflash_export.trace_hooks import attend, scatter_rows

EXAMPLE_ROWS = 5
EXAMPLE_CAPACITY = 64

Rows = list[tuple[Tensor, Tensor]]
"""Per layer keys and values [1, kv_heads, T, D]."""


@dataclasses.dataclass(frozen=True)
class DrafterTables:
    """The embedding table and output head a drafter uses."""

    embedding_weight: str
    """Name in the bundle's weight index."""
    head_weight: str
    vocab_size: int
    target_ids: Tensor | None = None
    """The target's id of each row of the head, where it covers part of the vocabulary."""


class _ContextForTrace(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, taps: Tensor, position: Tensor, past: Rows) -> dict[str, Any]:
        positions = _positions(position, taps.shape[1])
        rows = self.drafter.context(taps, positions)
        return {"present": [_append(p, r, position) for p, r in zip(past, rows, strict=True)]}


class _DraftForTrace(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, input_ids: Tensor, position: Tensor, past: Rows) -> dict[str, Any]:
        b = input_ids.shape[1]
        positions = _positions(position, b)
        length = position + b
        present: Rows = []

        def attend_cached(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rule = self.drafter.config.layers[layer]
            keys, values = _append(past[layer], (key, value), position)
            present.append((keys, values))
            mask = None
            if rule.window_tokens is not None:
                rows = torch.arange(keys.shape[2]).reshape(1, 1, 1, -1)
                # Rows past the valid length are hidden by the mask too, so a lowering may rely on it alone.
                mask = rule.sees(positions.unsqueeze(1).unsqueeze(3), rows) & (rows < length)
            return attend(
                query, keys, values, length=length, scale=query.shape[-1] ** -0.5, layer=layer, mask=mask,
                causal=rule.causal, window_tokens=rule.window_tokens,
            )  # fmt: skip

        hidden = self.drafter.block(input_ids, positions, attend_cached)
        logits = self.drafter.logits(hidden[:, 1:])
        return {**self.drafter.outputs(hidden[:, 1:], logits, input_ids[:, :1]), "present": present}


def trace_context(config: DrafterConfig, dtype: torch.dtype, taps_dtype: torch.dtype | None = None) -> ir.Model:
    """Traces `drafter_context`: taps in, the drafter's context rows appended.

    Args:
        config: The drafter's facts.
        dtype: Dtype of parameters and cache.
        taps_dtype: Dtype of the taps where the target hands them on in another one.

    Returns:
        The graph with hollow initializers `drafter.<name>`.

    Raises:
        UnsupportedModelError: the tracer fails.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    drafter = _hollow_drafter(config, DrafterTables("", "", 2), dtype, fake)
    K, H = len(config.target_layer_ids), config.target_hidden_size
    with fake:
        taps = torch.zeros(1, EXAMPLE_ROWS, K * H, dtype=taps_dtype or dtype)
        example = {"taps": taps} | _example_state(config, dtype)
    names = {name: PREFIX + name for name, _ in drafter.named_parameters()}
    model = _export(_ContextForTrace(drafter), example, "taps", names)
    _name_interface(model, ["taps", "position"], [], config.num_layers)
    return model


def trace_drafter(config: DrafterConfig, tables: DrafterTables, dtype: torch.dtype) -> ir.Model:
    """Traces `drafter`: a block of anchor and mask ids in, proposals out.

    Args:
        config: The drafter's facts.
        tables: Embedding and head; both names may be the same tied weight.
        dtype: Dtype of parameters and cache.

    Returns:
        The graph with hollow initializers `drafter.<name>` and those named by `tables`.

    Raises:
        UnsupportedModelError: the tracer fails.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    drafter = _hollow_drafter(config, tables, dtype, fake)
    with fake:
        ids = torch.zeros(1, EXAMPLE_ROWS, dtype=torch.long)
        example = {"input_ids": ids} | _example_state(config, dtype)
    names = {name: PREFIX + name for name, _ in drafter.named_parameters(remove_duplicate=False)}
    names |= {EMBEDDING: tables.embedding_weight, HEAD: tables.head_weight}
    model = _export(_DraftForTrace(drafter), example, "input_ids", names)
    outputs = ["draft_ids", "draft_logits"]
    outputs += ["draft_candidates", "draft_edges"] if config.dflash2 is not None else []
    outputs += ["draft_vocabulary"] if tables.target_ids is not None else []
    _name_interface(model, ["input_ids", "position"], outputs, config.num_layers)
    return model


def _hollow_drafter(config: DrafterConfig, tables: DrafterTables, dtype: torch.dtype, fake: FakeTensorMode) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config, tables.vocab_size)
    for name, parameter in list(drafter.named_parameters()):
        with fake:
            data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        set_parameter(drafter, name, nn.Parameter(data, requires_grad=False))
    if tables.embedding_weight == tables.head_weight:
        drafter.lm_head.weight = drafter.embed_tokens.weight
    drafter.target_ids = tables.target_ids
    return drafter.eval()


def _example_state(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    def buffer() -> Tensor:
        return torch.zeros(1, config.num_kv_heads, EXAMPLE_CAPACITY, config.head_dim, dtype=dtype)

    past = [(buffer(), buffer()) for _ in range(config.num_layers)]
    return {"position": torch.zeros(1, dtype=torch.long), "past": past}


def _positions(position: Tensor, count: int) -> Tensor:
    """Absolute positions [1, count] of the rows from `position` on."""
    return position.unsqueeze(1) + torch.arange(count).unsqueeze(0)


def _append(past: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], position: Tensor) -> tuple[Tensor, Tensor]:
    return scatter_rows(past[0], rows[0], position), scatter_rows(past[1], rows[1], position)


def _export(module: nn.Module, example: dict[str, Any], rows_input: str, names: dict[str, str]) -> ir.Model:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {rows_input: {1: dynamic}, "position": {}, "past": [({2: dynamic}, {2: dynamic}) for _ in example["past"]]}
    with refusing_by_name("the DFlash drafter"):
        program = export_quietly(module, example, shapes)
        return clean_graph(program.model, {f"drafter.{name}": final for name, final in names.items()})


def _name_interface(model: ir.Model, inputs: list[str], outputs: list[str], num_layers: int) -> None:
    """Gives inputs and outputs the names of the graph contract."""
    pairs = state_pairs(num_layers)
    for value, name in zip(model.graph.inputs, [*inputs, *(past for past, _ in pairs)], strict=True):
        value.name = name
    for value, name in zip(model.graph.outputs, [*outputs, *(present for _, present in pairs)], strict=True):
        value.name = name
