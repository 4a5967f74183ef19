"""Parts of a target in PyTorch, read from the checkpoint one at a time, so that no model is too large to check.

The module is Transformers' own. Layers that are not under test let the residual stream pass, the embedding holds
only the rows asked for, and the output head is read in slices.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from dflash_export.converted_places import ConvertedPlace
from dflash_export.dequantized_weights import DequantizedPlace
from dflash_export.hollow_model import adopt_stored_buffers, decoder_layers, island_dtype
from dflash_export.read_on_use import LARGE_ELEMENTS, ReadOnUse
from dflash_export.reference_run import Array, Step, StepOutputs, TargetReference, quiet_transformers
from dflash_export.rope_limits import freeze_rope
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import TORCH_DTYPES
from dflash_export.weight_values import read_converted


class _Passthrough(nn.Module):
    """Stands in for a layer: same attributes, but the residual stream passes unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        self._gives_tuple = _gives_tuple(layer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self._gives_tuple else hidden_states


def _gives_tuple(layer: nn.Module) -> bool:
    """Whether a layer's forward ends in a tuple; its annotation often says so when its code does not."""
    code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(layer).forward))))
    last = [node for node in ast.walk(code) if isinstance(node, ast.Return)][-1].value
    return isinstance(last, ast.Tuple) or (isinstance(last, ast.Name) and last.id == "outputs")


class _OneLayerCache(DynamicCache):  # type: ignore[misc]
    """A cache in which only one layer has rows, and every length is that layer's."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(self.index))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class LayerReference:
    """A target of which only the part under test has weights."""

    def __init__(
        self,
        config: PreTrainedConfig,
        places: dict[str, TensorPlace],
        stored_dtype: str,
        run_dtype: torch.dtype,
        table_names: tuple[str, str],
    ) -> None:
        """Makes the hollow module and fills what is small: everything but layers, embedding and head.

        Args:
            config: The target's config.
            places: State-dict name -> tensor in the checkpoint.
            stored_dtype: Dtype the bundle rounds weights to (F32, F16, BF16).
            run_dtype: Dtype the reference computes in.
            table_names: State-dict names of embedding and head.
        """
        config = type(config).from_dict(config.to_dict())
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=run_dtype, attn_implementation="eager")
        self.model.eval()
        adopt_stored_buffers(self.model)
        self._islands = self.model._get_dtype_plan(TORCH_DTYPES[stored_dtype])
        freeze_rope(self.model)
        self.num_layers = int(config.get_text_config().num_hidden_layers)
        self.places, self.stored_dtype, self.run_dtype = places, stored_dtype, run_dtype
        self.embedding_name, self.head_name = table_names
        self.layers = decoder_layers(self.model, self.num_layers)
        self._originals = list(self.layers)
        self._names = {id(module): name for name, module in self.model.named_modules()}
        in_layers = {id(p) for layer in self._originals for p in layer.parameters()}
        tables = {id(self._table().weight), id(self._head().weight)}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in in_layers | tables:
                    module._parameters[name] = self._read(f"{self._names[id(module)]}.{name}")
        for i in range(self.num_layers):
            self.layers[i] = _Passthrough(self._originals[i])

    def _table(self) -> Any:
        return self.model.get_input_embeddings()

    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def _read(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.rows(name), requires_grad=False)

    def _on_use(self, name: str, parameter: Tensor) -> Any:
        """A large weight is read whenever it is used, a small one now."""
        if parameter.numel() < LARGE_ELEMENTS:
            return self._read(name)
        kept = island_dtype(name, self._islands)
        return ReadOnUse(tuple(parameter.shape), kept or self.run_dtype, lambda rows: self.rows(name, rows))

    def rows(self, name: str, rows: slice | None = None) -> Tensor:
        """A weight, or some of its rows, rounded as the bundle rounds it, in the dtype of the run."""
        place = self.places[name]
        start, stop, _ = (rows or slice(None)).indices(place.shape[0])
        island = island_dtype(name, self._islands)
        dtypes = [island] if island is not None else [TORCH_DTYPES[self.stored_dtype], self.run_dtype]
        if isinstance(place, ConvertedPlace):
            part = place.tensor()[start:stop]
            for dtype in dtypes:
                part = part.to(dtype)
            return part
        if isinstance(place, DequantizedPlace):
            dtypes = [self.run_dtype]  # the graph computes it from integers and scales, in its own precision
        return read_converted(place.rows(start, stop), *dtypes)

    def _set_tables(self, table: Tensor, head: Tensor) -> None:
        self._table().weight = nn.Parameter(table, requires_grad=False)
        self._head().weight = nn.Parameter(head, requires_grad=False)

    def run_layer(self, index: int, steps: list[Step], inputs: list[Tensor]) -> tuple[list[Array], list[StepOutputs]]:
        """Runs one layer over calls with given residual streams, as if its cache were cut to each call's position.

        All texts that the calls make are computed at once and without a cache, so each weight is read once.

        Args:
            index: Layer number.
            steps: The calls; only their positions and lengths are used.
            inputs: Per call the residual stream [1, S, H].

        Returns:
            Per call what entered the layer [1, S, H], and its raw output in `hidden[0]`, keys and values.
        """
        texts: list[Tensor] = []
        for step, residual in zip(steps, inputs, strict=True):
            texts.append(torch.cat([*(text[: step.position] for text in texts[-1:]), residual[0]]))
        cache = _OneLayerCache(index)
        entered, output = self._run(index, nn.utils.rnn.pad_sequence(texts, batch_first=True), 0, cache)
        keys, values = _numpy(cache.layers[index].keys), _numpy(cache.layers[index].values)
        results = []
        for i, step in enumerate(steps):
            end = step.position + len(step.ids)
            hidden = output[i, step.position : end]
            results.append(StepOutputs(hidden[:0], hidden[None], [keys[i, :, :end]], [values[i, :, :end]]))
        return [entered[i : i + 1, s.position : s.position + len(s.ids)] for i, s in enumerate(steps)], results

    def run_on_cache(
        self, index: int, residual: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Array, StepOutputs]:
        """Runs one layer on top of given cache rows, however many.

        Args:
            index: Layer number.
            residual: Residual stream [1, S, H] of the new rows.
            keys: [1, kv_heads, P, D], the rows before.
            values: [1, kv_heads, P, Dv]

        Returns:
            As `run_layer`, for the one call.
        """
        cache = _OneLayerCache(index)
        cache.update(keys, values, index)
        entered, output = self._run(index, residual, keys.shape[2], cache)
        layer = cache.layers[index]
        return entered, StepOutputs(output[0, :0], output, [_numpy(layer.keys[0])], [_numpy(layer.values[0])])

    def _run(self, index: int, residual: Tensor, position: int, cache: _OneLayerCache) -> tuple[Array, Array]:
        """What entered a layer and what left it, [B, S, H] each."""
        layer = self._originals[index]
        self._fill(layer)
        self.layers[index] = layer
        small = torch.zeros(1, residual.shape[-1], dtype=self.run_dtype)
        self._set_tables(small, small)
        seen: list[Array] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(_numpy(args[0] if args else kwargs["hidden_states"]))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(_numpy(output[0] if isinstance(output, tuple) else output))

        hooks = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
        reference = TargetReference(self.model)
        reference.cache = cache
        try:
            reference.call(position, inputs_embeds=residual)
        finally:
            for hook in hooks:
                hook.remove()
            self.layers[index] = _Passthrough(layer)
        return seen[0], seen[1]

    def _fill(self, layer: nn.Module) -> None:
        prefix = self._names[id(layer)]
        for name, module in layer.named_modules():
            for part, parameter in module._parameters.items():
                if parameter is not None:
                    full = ".".join(p for p in (prefix, name, part) if p)
                    module._parameters[part] = self._on_use(full, parameter)

    @torch.no_grad()
    def embed(self, token_ids: list[int]) -> Tensor:
        """The residual stream [1, n, H] that enters layer 0 for the given tokens, read row by row."""
        table = torch.cat([self.rows(self.embedding_name, slice(i, i + 1)) for i in token_ids])
        self._set_tables(table, table[:1])
        outputs = TargetReference(self.model).run(Step(0, list(range(len(token_ids)))))
        return torch.from_numpy(outputs.hidden[0])[None]

    @torch.no_grad()
    def head(self, residual: Tensor, rows: slice) -> Tensor:
        """Logits [n, rows] of a residual stream [1, n, H] for one slice of the vocabulary."""
        weight = self.rows(self.head_name, rows)
        self._set_tables(weight[:1], weight)
        outputs = TargetReference(self.model).run(Step(0, [0] * residual.shape[1]), residual)
        return torch.from_numpy(outputs.logits)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().float().numpy().copy()
