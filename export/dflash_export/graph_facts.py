"""The interface of each graph: names, dtypes and symbolic shapes as the bundle states them."""

from __future__ import annotations

import onnx_ir as ir

from dflash_runtime.bundle import GraphFacts, StateTensor, TensorFacts

ROLLBACK_BY_LENGTH = "length"
_SPELLING = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT64: "I64",
}
# The symbolic dimensions of the graph contract, by tensor; state tensors are [1, heads, T, D].
_SYMBOLS: dict[tuple[str, str], list[str | None]] = {
    ("target", "input_ids"): [None, "S"],
    ("target", "logit_rows"): ["R"],
    ("target", "logits"): [None, "R", None],
    ("target", "token_ids"): [None, "R"],
    ("target", "taps"): [None, "S", None],
    ("drafter_context", "taps"): [None, "S", None],
    ("drafter", "input_ids"): [None, "b"],
    ("drafter", "draft_ids"): [None, "b-1"],
    ("drafter", "draft_logits"): [None, "b-1", None],
    ("drafter", "draft_candidates"): [None, "b-1", None],
    ("drafter", "draft_edges"): [None, "b-1", None, None],
}


def state_pairs(num_layers: int) -> list[tuple[str, str]]:
    """Names of past and present tensors, layer by layer, key before value."""
    return [
        (f"past_key_values.{i}.{part}", f"present.{i}.{part}") for i in range(num_layers) for part in ("key", "value")
    ]


def finish_interface(model: ir.Model, kind: str, file: str, windows: list[int | None]) -> GraphFacts:
    """Writes the contract's symbolic shapes into a graph and returns its facts.

    Args:
        model: The graph; shapes of inputs and outputs are set in place.
        kind: `target`, `drafter_context` or `drafter`.
        file: Name of the graph's file in the bundle.
        windows: Per layer the attention window in tokens, None for full attention.
    """
    pairs = state_pairs(len(windows))
    state_names = {name for pair in pairs for name in pair}
    for value in (*model.graph.inputs, *model.graph.outputs):
        name = value.name or ""
        symbols = [None, None, "T", None] if name in state_names else _SYMBOLS.get((kind, name))
        if symbols is not None:
            assert value.shape is not None
            dims = [d if isinstance(d, int) else str(d.value) for d in value.shape]
            value.shape = ir.Shape([dims[i] if symbol is None else symbol for i, symbol in enumerate(symbols)])
    by_name = {v.name: v for v in (*model.graph.inputs, *model.graph.outputs)}
    return GraphFacts(
        file=file,
        inputs=[_facts(v) for v in model.graph.inputs if v.name not in state_names],
        outputs=[_facts(v) for v in model.graph.outputs if v.name not in state_names],
        state=[
            StateTensor(
                past,
                present,
                "kv" if windows[k // 2] is None else "windowed_kv",
                _facts(by_name[past]).shape,
                windows[k // 2],
                ROLLBACK_BY_LENGTH,
            )
            for k, (past, present) in enumerate(pairs)
        ],
    )


def _facts(value: ir.Value) -> TensorFacts:
    assert value.shape is not None and value.dtype is not None and value.name is not None
    shape: list[int | str] = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return TensorFacts(value.name, _SPELLING[value.dtype], shape)
