"""Traces a target to ONNX without its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from dflash_export.graph_cleanup import clean_graph
from dflash_export.hollow_model import causal_lm_class, decoder_layers, make_hollow_model
from dflash_export.real_rotary import make_rotary_real
from dflash_export.refusals import refuse_by_config, refuse_by_modules, refuse_own_attention
from dflash_export.rope_limits import freeze_rope
from dflash_export.trace_hooks import ATTENTION_NAME, ONNX_OPSET, LayerState, RowsCache, TraceState, tracing
from dflash_export.trace_share import TraceShare
from dflash_export.weight_store import Progress
from dflash_runtime.errors import DFlashError, UnsupportedModelError

EXAMPLE_TOKENS = 5
EXAMPLE_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class TracedTarget:
    """The traced graph and what the trace learned about the model."""

    model: ir.Model
    """Inputs and outputs as in the graph contract, every layer's `hidden_states.{i}` among the outputs."""
    layers: list[LayerState]
    parameter_names: dict[str, str]
    """Initializer name in the graph -> state-dict name, tied parameters by one name."""
    parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """State-dict name -> dtype and shape."""
    embedding_weight: str
    head_weight: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_parameters: int
    architecture: str
    module: nn.Module
    """The hollow module that was traced."""


class _TargetForTrace(nn.Module):
    """The function that is traced: the model, with cache buffers in and out."""

    def __init__(self, model: nn.Module, num_layers: int, on_layer: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self.num_layers = num_layers
        self.on_layer = on_layer

    def forward(self, input_ids: Tensor, position: Tensor, logit_rows: Tensor, past: list[tuple[Tensor, Tensor]]
                ) -> dict[str, Any]:
        state = TraceState(position, [LayerState() for _ in range(self.num_layers)])
        with tracing(state):
            cache = RowsCache(past, state)
            hidden, logits = run_model(
                self.model, self.num_layers, cache, input_ids, position, logit_rows, self.on_layer
            )
        # One non-finite logit makes the sum NaN; then no token is named (argmax of NaN would be "!").
        finite = (logits * 0).sum(-1) == 0
        token_ids = torch.where(finite, logits.argmax(-1), -1)
        return {"logits": logits, "token_ids": token_ids, "hidden": hidden, "present": cache.present}


def run_model(model: nn.Module, num_layers: int, cache: RowsCache, input_ids: Tensor, position: Tensor,
              logit_rows: Tensor, on_layer: Callable[[], None] | None = None) -> tuple[list[Tensor], Tensor]:
    """One forward pass with every layer's raw output caught by hooks; `on_layer` is told of each.

    Returns:
        hidden: `num_layers + 1` tensors [B, S, H]: the embedding output, then each layer's raw output.
        logits: [B, R, V] in fp32.
    """
    S = input_ids.shape[1]
    position_ids = position[:, None] + torch.arange(S)[None, :]
    hidden: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)
        if on_layer is not None:
            on_layer()

    layers = decoder_layers(model, num_layers)
    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        output = model(
            input_ids=input_ids, position_ids=position_ids, cache=cache, use_cache=True, logits_to_keep=logit_rows
        )
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, output.logits.float()


def trace_target(config: PreTrainedConfig, dtype: torch.dtype, progress: Progress | None = None) -> TracedTarget:
    """Traces the causal-LM class of `config`.

    Args:
        config: The target's configuration.
        dtype: Dtype of parameters, cache and taps.
        progress: Called with stage, done, total.

    Returns:
        The graph with hollow initializers under state-dict names, and the facts the trace found.

    Raises:
        UnsupportedModelError: the model has layers this exporter does not serve; the message names them.
    """
    with refusing_by_name(causal_lm_class(config).__name__):
        refuse_by_config(config)
    text_config = config.get_text_config(decoder=True)
    num_layers = int(text_config.num_hidden_layers)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with refusing_by_name(causal_lm_class(config).__name__):
        model, layers = prepare_target(config, dtype, fake)
        share = TraceShare(progress, num_layers)
        program = _export(model, num_layers, layers, dtype, fake, share.layer_passed)
    share.captured()
    names = _parameter_names(model)
    ir_model = clean_graph(program.model, {f"model.{name}": canonical for name, canonical in names.items()})
    share.finished()
    _name_outputs(ir_model, num_layers)
    embedding, head = _shared_tables(model, names)
    parameters = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}
    return TracedTarget(
        model=ir_model,
        layers=layers,
        parameter_names=names,
        parameters=parameters,
        embedding_weight=embedding,
        head_weight=head,
        hidden_size=int(text_config.hidden_size),
        num_layers=num_layers,
        vocab_size=parameters[head][1][0],
        num_parameters=sum(p.numel() for p in model.parameters()),
        architecture=type(model).__name__,
        module=model,
    )


def prepare_target(config: PreTrainedConfig, dtype: torch.dtype, fake: FakeTensorMode) -> tuple[Any, list[LayerState]]:
    """The hollow model and what a pass through it shows of every layer.

    A model with attention code of its own is taken as it is: its elementary operations run over the whole capacity,
    under masks that Transformers makes for its eager attention.
    """
    model = _make_traceable(config, dtype, fake, ATTENTION_NAME)
    refuse_by_modules(model)
    try:
        layers = _probe(model, fake)
    except (AttributeError, TypeError):  # code that expects a mask where the interface needs none
        if not model._supports_attention_backend:
            refuse_own_attention(config)
        raise
    if any(layer.attention_calls for layer in layers):
        return model, layers
    refuse_own_attention(config)
    model = _make_traceable(config, dtype, fake, "eager")
    return model, _probe(model, fake)


def _make_traceable(config: PreTrainedConfig, dtype: torch.dtype, fake: FakeTensorMode, attention: str) -> Any:
    model = make_hollow_model(config, dtype, fake, attention)
    freeze_rope(model)
    make_rotary_real(model)
    return model


def _probe(model: Any, fake: FakeTensorMode) -> list[LayerState]:
    """A pass without data: the true shape of every layer's cache, and a refusal before any long work."""
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    with fake, torch.no_grad():
        position = torch.zeros(1, dtype=torch.long)
        state = TraceState(position, [LayerState() for _ in range(num_layers)])
        with tracing(state):
            cache = RowsCache(None, state)
            ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long)
            hidden, _ = run_model(model, num_layers, cache, ids, position, torch.zeros(1, dtype=torch.long))
    stateless = [i for i, layer in enumerate(state.layers) if layer.key_shape is None]
    if stateless:
        raise UnsupportedModelError(f"layers {stateless} keep no KV cache of their own")
    if len(hidden) != num_layers + 1 or any(h.shape != hidden[0].shape for h in hidden):
        raise UnsupportedModelError("its layers do not hand on one residual stream")
    return state.layers


def _export(model: nn.Module, num_layers: int, layers: list[LayerState], dtype: torch.dtype, fake: FakeTensorMode,
            on_layer: Callable[[], None]) -> Any:
    dynamic = torch.export.Dim.DYNAMIC

    def buffer(shape: tuple[int, int] | None) -> Tensor:
        assert shape is not None
        return torch.zeros(1, shape[0], EXAMPLE_CAPACITY, shape[1], dtype=dtype)

    with fake:
        example = {
            "input_ids": torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long),
            "position": torch.zeros(1, dtype=torch.long),
            "logit_rows": torch.zeros(3, dtype=torch.long),
            "past": [(buffer(layer.key_shape), buffer(layer.value_shape)) for layer in layers],
        }
    shapes = {
        "input_ids": {1: dynamic},
        "position": {},
        "logit_rows": {0: dynamic},
        "past": [({2: dynamic}, {2: dynamic}) for _ in layers],
    }
    return export_quietly(_TargetForTrace(model, num_layers, on_layer), example, shapes)


def export_quietly(module: nn.Module, example: dict[str, Any], dynamic_shapes: dict[str, Any]) -> Any:
    """`torch.onnx.export` of a hollow module, without its chatter.

    Args:
        module: What to trace; it is put into evaluation mode.
        example: Keyword arguments, fake tensors.
        dynamic_shapes: As `torch.export` takes them.
    """
    module.eval()
    quiet = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                module, (), kwargs=example, dynamo=True, optimize=False, verbose=False,
                dynamic_shapes=dynamic_shapes, opset_version=ONNX_OPSET,
            )
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def refusing_by_name(name: str) -> Iterator[None]:
    """Turns a refusal, or a failure inside model code or the tracer, into one that names the model class."""
    try:
        yield
    except DFlashError as error:
        raise type(error)(f"{name} cannot be exported: {error}.") from error
    except Exception as error:
        chain: list[BaseException] = [error]
        while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
            chain.append(inner)
        refused = next((link for link in chain if isinstance(link, DFlashError)), None)
        if refused is not None:
            raise type(refused)(f"{name} cannot be exported: {refused}.") from error
        raise UnsupportedModelError(f"{name} cannot be exported: {_reason(chain[-1])}.") from error


def _reason(cause: BaseException) -> str:
    """What a failure of the tracer means for the model."""
    kind = type(cause).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return "its code branches on the values of a tensor, which a static graph cannot"
    detail = str(cause).strip().split("\n")[0][:300]
    return f"tracing it with a preallocated cache failed ({kind}: {detail})"


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the one name its weight has in the bundle."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: canonical[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _shared_tables(model: Any, names: dict[str, str]) -> tuple[str, str]:
    """Names of the embedding table and the output head, which the drafter borrows."""
    by_id = {id(parameter): names[name] for name, parameter in model.named_parameters()}
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if table is None or head is None or not hasattr(table, "weight") or not hasattr(head, "weight"):
        raise UnsupportedModelError(f"{type(model).__name__} has no plain embedding table and output head")
    return by_id[id(table.weight)], by_id[id(head.weight)]


def _name_outputs(model: ir.Model, num_layers: int) -> None:
    """Gives inputs and outputs the names and symbolic shapes of the graph contract."""
    graph = model.graph
    state_names = [f"{i}.{part}" for i in range(num_layers) for part in ("key", "value")]
    for value, name in zip(graph.inputs, ["input_ids", "position", "logit_rows", *state_names], strict=True):
        value.name = name if name[0].isalpha() else f"past_key_values.{name}"
    hidden = [f"hidden_states.{i}" for i in range(num_layers + 1)]
    presents = [f"present.{name}" for name in state_names]
    for value, name in zip(graph.outputs, ["logits", "token_ids", *hidden, *presents], strict=True):
        value.name = name
