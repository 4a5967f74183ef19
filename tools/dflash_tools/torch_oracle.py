"""What PyTorch says of a pair, call by call: Transformers' own target and the drafter's module, every part watched."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from dflash_export.drafter import Drafter, masked_attention, proposals_by_definition
from dflash_export.drafter_weights import PREFIX, quantized_parameters
from dflash_export.reference_run import Step, TargetReference
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_tools.reference_tensors import Array, Tensors, cache_rows_of, rows_of
from dflash_tools.torch_int8_products import round_activations, rounded_to_int8

INPUT = ":input"
_BEFORE_ROWS = re.compile(r"(k_proj|k_proj:input|k_norm|v_proj|input_layernorm|attention_conv\.kernel_projection)$")


class TorchOracle:
    """Target and drafter in PyTorch; a `GraphProbe`.

    The target keeps a cache of Transformers, the drafter none: each draft is computed anew from all taps.
    """

    name = "PyTorch"
    shows_block_rows = True

    def __init__(
        self, target: TargetReference, tap_layer_ids: Sequence[int], drafter: Drafter | None, precision: str,
        embedding_name: str,
    ) -> None:
        """Watches the modules.

        Args:
            target: The target.
            tap_layer_ids: As the drafter wants them.
            drafter: In the same precision, or None.
            precision: fp32, fp16 or bf16.
            embedding_name: Name of the table the drafter reads, without `.weight`.
        """
        self.precision, self._target, self._drafter = precision, target, drafter
        self._tap_layer_ids, self._embedding_name = list(tap_layer_ids), embedding_name
        self._dtype = TORCH_DTYPES[PRECISIONS[precision]]
        self._seen: Tensors = {}
        self._watching = False
        self._taps: list[Tensor] = []
        self._attention_next: str | None = None
        self._taps_block: int | None = None
        self._watch_target()
        if drafter is not None:
            self._watch_drafter(drafter)
        self.reset()

    def round_activations(self, blocks: Mapping[str, int], tables: tuple[str, str]) -> None:
        """From now on products with quantised weights round what they are given, as int8 kernels do.

        Args:
            blocks: Bundle name of a weight -> activations that share a scale.
            tables: Bundle names of the embedding and the head the drafter uses.
        """
        round_activations(self._target.model, blocks)
        if self._drafter is not None:
            names = quantized_parameters(blocks, tables)
            round_activations(self._drafter, {parameter: blocks[name] for parameter, name in names.items()})
            self._taps_block = blocks.get(f"{PREFIX}fc.weight")

    def can_draft(self, size: int) -> bool:
        """See `GraphProbe.can_draft`."""
        return True

    def reset(self) -> None:
        """See `GraphProbe.reset`."""
        self._target.cache = _WatchedCache(self._cache_rows_written)
        self._taps = []

    def target(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.target`."""
        self._seen, self._watching = {}, True
        outputs = self._target.run(Step(position, list(ids)))
        self._watching = False
        tensors: Tensors = {}
        for name, array in self._seen.items():
            tensors[name] = array
            for k, layer in enumerate(self._tap_layer_ids):
                if name == f"hidden_states.{layer + 1}":
                    tensors[f"taps.{k}"] = array
        return {**tensors, "logits": outputs.logits}

    @torch.no_grad()
    def context(self, taps: Array, position: int) -> Tensors:
        """See `GraphProbe.context`."""
        drafter = self._need_drafter()
        given = torch.from_numpy(taps)[None].to(self._dtype)
        if self._taps_block is not None:
            given = rounded_to_int8(given, self._taps_block)
        self._taps = [torch.cat([*(t[:, :position] for t in self._taps), given], dim=1)]
        self._seen, self._watching = {}, True
        fused = functional.linear(given.float(), drafter.fc.weight.float())
        self._note(f"{PREFIX}fc", fused)
        norm = drafter.hidden_norm
        self._note(f"{PREFIX}hidden_norm", functional.rms_norm(fused, fused.shape[-1:], norm.weight.float(), norm.eps))
        rows = drafter.context(given, torch.arange(position, position + len(taps))[None])
        self._watching = False
        return self._in_order(rows)

    @torch.no_grad()
    def draft(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.draft`."""
        drafter = self._need_drafter()
        context = drafter.context(self._taps[0][:, :position], torch.arange(position)[None])
        block: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            block.append((key, value))
            keys, values = (torch.cat(pair, dim=2) for pair in zip(context[layer], (key, value), strict=True))
            seen = masked_attention(query, keys, values, drafter.config.layers[layer])
            self._note(f"{PREFIX}layers.{layer}.self_attn.o_proj{INPUT}", seen.transpose(1, 2).flatten(2))
            return seen

        self._seen, self._watching = {}, True
        hidden = drafter.block(torch.tensor([list(ids)]), torch.arange(position, position + len(ids))[None], attend)
        self._watching = False
        logits = drafter.logits(hidden[:, 1:])
        anchor = torch.tensor([[ids[0]]])
        made = drafter.outputs(hidden[:, 1:], logits, anchor)
        del made["draft_ids"]  # tensors are in the order of computation, and these are by definition
        made["draft_ids"] = proposals_by_definition(drafter, hidden, logits, anchor).unsqueeze(2)
        return {**self._in_order(block), **{name: rows_of(tensor.numpy()) for name, tensor in made.items()}}

    def cache_rows(self, model: str) -> Tensors:
        """See `GraphProbe.cache_rows`; of the target only."""
        layers = self._target.cache.layers if model == "target" else []
        found: Tensors = {}
        for i, layer in enumerate(layers):
            for part, rows in (("key", layer.keys), ("value", layer.values)):
                found[f"present.{i}.{part}"] = cache_rows_of(rows.float().numpy(), 0, rows.shape[2])
        return found

    def _need_drafter(self) -> Drafter:
        assert self._drafter is not None, "the pair has no drafter"
        return self._drafter

    def _note(self, name: str, tensor: Tensor) -> None:
        if self._watching:
            self._seen[name] = rows_of(tensor.detach().float().numpy()).copy()

    def _cache_rows_written(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._note_rows(layer, key, value)
        self._attention_next = f".{layer}."  # what the next product of this layer is given is attention's output

    def _note_rows(self, layer: int, key: Tensor, value: Tensor) -> None:
        for part, rows in (("key", key), ("value", value)):
            if self._watching:
                array = rows.detach().float().numpy()
                self._seen[f"present.{layer}.{part}"] = cache_rows_of(array, 0, array.shape[2]).copy()

    def _watch_target(self) -> None:
        model = self._target.model
        tables = [model.get_input_embeddings(), model.get_output_embeddings()]
        for name, module in model.named_modules():
            if module._parameters and module not in tables:
                module.register_forward_hook(self._hook(name))
                module.register_forward_pre_hook(self._input_hook(name))
        self._target.layers[0].register_forward_pre_hook(self._first_hook, with_kwargs=True)
        for i, layer in enumerate(self._target.layers):
            layer.register_forward_hook(self._hook(f"hidden_states.{i + 1}"))

    def _watch_drafter(self, drafter: Drafter) -> None:
        for name, module in drafter.named_modules():
            if module._parameters and name not in ("fc", "hidden_norm", "lm_head"):
                known = self._embedding_name if name == "embed_tokens" else PREFIX + name
                if name.endswith((".k_proj", ".gate_proj")):  # behind a convolution this is no norm's output
                    module.register_forward_pre_hook(self._note_input(known))
                module.register_forward_hook(self._hook(known))

    def _hook(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.shape[0] == 1:
                self._note(name, tensor)

        return after

    def _note_input(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._note(name + INPUT, args[0])

    def _input_hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if self._attention_next is not None and isinstance(module, nn.Linear) and self._attention_next in name:
                self._attention_next = None
                self._note(name + INPUT, args[0])

        return before

    def _first_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note("hidden_states.0", args[0] if args else kwargs["hidden_states"])

    def _in_order(self, rows: Sequence[tuple[Tensor, Tensor]]) -> Tensors:
        """What was watched, each layer's cache rows behind the projections they come from."""
        seen, self._seen = self._seen, {}
        for name in [n for n in seen if f"{PREFIX}layers." not in n and n != f"{PREFIX}norm"]:
            self._seen[name] = seen.pop(name)
        for layer, (key, value) in enumerate(rows):
            own = [n for n in seen if n.startswith(f"{PREFIX}layers.{layer}.")]
            made = [n for n in own if _BEFORE_ROWS.search(n)]
            self._seen |= {n: seen.pop(n) for n in made}
            self._watching = True
            self._note_rows(layer, key, value)
            self._watching = False
            self._seen |= {n: seen.pop(n) for n in own if n not in made}
        return {**self._seen, **seen}


class _WatchedCache(DynamicCache):  # type: ignore[misc]
    """Transformers' cache that says what is written."""

    def __init__(self, watch: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__()
        self._watch = watch

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._watch(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
