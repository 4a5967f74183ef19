"""Makes a small random bundle by hand, so that the runtime can be tested without the exporter.

The models are toys (a learned position table instead of RoPE, LayerNormalization, ReLU), but graphs, files and
manifest are those of the contract. The `ort-cpu` engine differs from the portable graph in its matrix products.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dflash_runtime.bundle import (
    SCHEMA_VERSION,
    Bundle,
    DrafterFacts,
    GraphFacts,
    Manifest,
    Provenance,
    SourceFacts,
    StateTensor,
    TapFacts,
    TargetFacts,
    TensorFacts,
    TextFacts,
    WeightEntry,
    file_facts,
    write_record,
)
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, HostEngineRecord

BOS, EOS, IM_END = 256, 257, 258
FIRST_LIKELY = ord("a")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shape of the toy pair."""

    vocab: int = 264
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 64
    drafter_layers: int = 2
    taps: tuple[int, ...] = (0, 1)
    max_context: int = 96
    block_sizes: tuple[int, ...] = (1, 4, 8)
    block_size: int = 4
    mask_token: int = 263
    stop_token_ids: tuple[int, ...] = (EOS,)
    likely_tokens: int = 0
    """Where not 0, only so many tokens from `a` on have a large row in the head: a random drafter then hits
    now and then."""
    seed: int = 0


class _GraphMaker:
    """Collects nodes; every weight is external data of one safetensors file."""

    def __init__(self, sizes: Sizes, weights: dict[str, WeightEntry], lowered: bool) -> None:
        self.sizes = sizes
        self.lowered = lowered
        self.entries = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.state: list[StateTensor] = []

    def op(self, kind: str, *inputs: str, outputs: list[str] | None = None, **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        outputs = outputs or [name]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=name, **attributes))
        return outputs[0]

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = onnx.numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def weight(self, name: str) -> str:
        entry = self.entries[name]
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=entry.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", entry.file), ("offset", entry.offset_bytes), ("length", entry.length_bytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers[name] = tensor
        return name

    def linear(self, x: str, name: str, outputs: list[str] | None = None) -> str:
        if self.lowered:
            weight = self.weight(name)
            return self.op("FusedMatMul", x, weight, outputs=outputs, domain="com.microsoft", transB=1)
        return self.op("MatMul", x, self.op("Transpose", self.weight(name), perm=[1, 0]), outputs=outputs)

    def norm(self, x: str) -> str:
        scale = self.constant(np.ones(self.sizes.hidden), np.float32)
        return self.op("LayerNormalization", x, scale, axis=-1)

    def io(self, kind: str, name: str, dtype: str, shape: list[int | str]) -> str:
        code = {"F32": TensorProto.FLOAT, "I64": TensorProto.INT64}[dtype]
        fixed = [1 if d == "B" else d for d in shape]
        getattr(self, kind).append(helper.make_tensor_value_info(name, code, fixed))
        return name

    def rows(self, ids_or_taps: str) -> str:
        """Number of rows of this call, as [1]."""
        return self.op("Shape", ids_or_taps, start=1, end=2)

    def add_positions(self, x: str, count: str) -> str:
        zero, one, axis = self.constant(0), self.constant(1), self.constant([0])
        steps = self.op("Range", zero, self.op("Squeeze", count, axis), one)
        table = self.op("Gather", self.weight("positions"), self.op("Add", steps, "position"))
        return self.op("Add", x, table)

    def split_heads(self, x: str, heads: int) -> str:
        shape = self.constant([0, 0, heads, self.sizes.head_dim])
        return self.op("Transpose", self.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def cache(self, layer: int, part: str, new: str) -> str:
        s = self.sizes
        shape: list[int | str] = ["B", s.kv_heads, "T", s.head_dim]
        past = self.io("inputs", f"past_key_values.{layer}.{part}", "F32", shape)
        present = self.io("outputs", f"present.{layer}.{part}", "F32", shape)
        self.state.append(StateTensor(past, present, "kv", shape, None, "length"))
        return self.op("TensorScatter", past, new, "position", outputs=[present], axis=2, mode="linear")

    def keys_and_values(self, x: str, layer: int, prefix: str) -> tuple[str, str]:
        return tuple(  # type: ignore[return-value]
            self.cache(layer, part, self.split_heads(self.linear(x, f"{prefix}{layer}.{part}"), self.sizes.kv_heads))
            for part in ("key", "value")
        )

    def layer(self, x: str, layer: int, prefix: str, count: str, causal: int) -> str:
        n = self.norm(x)
        query = self.split_heads(self.linear(n, f"{prefix}{layer}.query"), self.sizes.heads)
        key, value = self.keys_and_values(n, layer, prefix)
        valid = self.op("Add", count, "position")
        attended = self.op("Attention", query, key, value, "", "", "", valid, is_causal=causal)
        merged = self.op("Transpose", attended, perm=[0, 2, 1, 3])
        merged = self.op("Reshape", merged, self.constant([0, 0, -1]))
        x = self.op("Add", x, self.linear(merged, f"{prefix}{layer}.out"))
        inner = self.op("Relu", self.linear(self.norm(x), f"{prefix}{layer}.up"))
        return self.op("Add", x, self.linear(inner, f"{prefix}{layer}.down"))

    def save(self, path: Path) -> GraphFacts:
        graph = helper.make_graph(
            self.nodes, path.stem, self.inputs, self.outputs, initializer=list(self.initializers.values())
        )
        opsets = [helper.make_opsetid("", 24)]
        if self.lowered:
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        path.write_bytes(model.SerializeToString())
        state = {tensor.input for tensor in self.state} | {tensor.output for tensor in self.state}
        return GraphFacts(path.name, _facts(self.inputs, state), _facts(self.outputs, state), self.state)


def _facts(values: list[onnx.ValueInfoProto], state: set[str]) -> list[TensorFacts]:
    names = {TensorProto.FLOAT: "F32", TensorProto.INT64: "I64"}
    return [
        TensorFacts(
            value.name,
            names[value.type.tensor_type.elem_type],
            [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
        )
        for value in values
        if value.name not in state
    ]


def _target_graph(sizes: Sizes, weights: dict[str, WeightEntry], path: Path, lowered: bool) -> GraphFacts:
    g = _GraphMaker(sizes, weights, lowered)
    ids = g.io("inputs", "input_ids", "I64", ["B", "S"])
    g.io("inputs", "position", "I64", [1])
    wanted = g.io("inputs", "logit_rows", "I64", ["R"])
    count = g.rows(ids)
    x = g.add_positions(g.op("Gather", g.weight("embed"), ids), count)
    layers = []
    for i in range(sizes.layers):
        x = g.layer(x, i, "target.", count, causal=1)
        layers.append(x)
    chosen = g.norm(g.op("Gather", x, wanted, axis=1))
    logits = g.linear(chosen, "embed", ["logits"])
    spoiled = g.op(
        "IsNaN", g.op("ReduceSum", g.op("Mul", logits, g.constant(0, np.float32)), g.constant([-1]), keepdims=0)
    )
    g.op("Where", spoiled, g.constant(-1), g.op("ArgMax", logits, axis=-1, keepdims=0), outputs=["token_ids"])
    g.op("Concat", *[layers[i] for i in sizes.taps], outputs=["taps"], axis=-1)
    g.io("outputs", "logits", "F32", ["B", "R", sizes.vocab])
    g.io("outputs", "token_ids", "I64", ["B", "R"])
    g.io("outputs", "taps", "F32", ["B", "S", len(sizes.taps) * sizes.hidden])
    return g.save(path)


def _context_graph(sizes: Sizes, weights: dict[str, WeightEntry], path: Path, lowered: bool) -> GraphFacts:
    g = _GraphMaker(sizes, weights, lowered)
    taps = g.io("inputs", "taps", "F32", ["B", "S", len(sizes.taps) * sizes.hidden])
    g.io("inputs", "position", "I64", [1])
    x = g.add_positions(g.norm(g.linear(taps, "drafter.fc")), g.rows(taps))
    for i in range(sizes.drafter_layers):
        g.keys_and_values(x, i, "drafter.")
    return g.save(path)


def _drafter_graph(sizes: Sizes, weights: dict[str, WeightEntry], path: Path, lowered: bool) -> GraphFacts:
    g = _GraphMaker(sizes, weights, lowered)
    ids = g.io("inputs", "input_ids", "I64", ["B", "b"])
    g.io("inputs", "position", "I64", [1])
    count = g.rows(ids)
    x = g.add_positions(g.op("Gather", g.weight("embed"), ids), count)
    for i in range(sizes.drafter_layers):
        x = g.layer(x, i, "drafter.", count, causal=0)
    last = g.constant([2**31])
    x = g.norm(g.op("Slice", x, g.constant([1]), last, g.constant([1])))
    logits = g.linear(x, "embed", ["draft_logits"])
    g.op("ArgMax", logits, outputs=["draft_ids"], axis=-1, keepdims=0)
    g.io("outputs", "draft_ids", "I64", ["B", "d"])
    g.io("outputs", "draft_logits", "F32", ["B", "d", sizes.vocab])
    return g.save(path)


def _weight_shapes(sizes: Sizes, drafter: bool) -> dict[str, tuple[int, ...]]:
    s = sizes
    shapes: dict[str, tuple[int, ...]] = {"embed": (s.vocab, s.hidden), "positions": (s.max_context + 256, s.hidden)}
    prefixes = [("target.", s.layers)] + ([("drafter.", s.drafter_layers)] if drafter else [])
    for prefix, layers in prefixes:
        for i in range(layers):
            shapes[f"{prefix}{i}.query"] = (s.heads * s.head_dim, s.hidden)
            shapes[f"{prefix}{i}.key"] = shapes[f"{prefix}{i}.value"] = (s.kv_heads * s.head_dim, s.hidden)
            shapes[f"{prefix}{i}.out"] = (s.hidden, s.heads * s.head_dim)
            shapes[f"{prefix}{i}.up"] = (s.intermediate, s.hidden)
            shapes[f"{prefix}{i}.down"] = (s.hidden, s.intermediate)
    if drafter:
        shapes["drafter.fc"] = (s.hidden, len(s.taps) * s.hidden)
    return shapes


def _stored(value: np.ndarray[Any, np.dtype[np.float32]], precision: str) -> tuple[str, bytes]:
    if precision == "bf16":
        return "BF16", (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    return {"fp32": "F32", "fp16": "F16"}[precision], value.astype(dtype).tobytes()


def _write_weights(sizes: Sizes, drafter: bool, root: Path, precision: str) -> dict[str, WeightEntry]:
    random = np.random.default_rng(sizes.seed)
    header: dict[str, dict[str, Any]] = {}
    pieces, entries, at = [], {}, 0
    shapes = _weight_shapes(sizes, drafter)
    for name, shape in shapes.items():
        value = random.standard_normal(shape, np.float32) * np.float32(
            1 if name == "positions" else min(0.3, shape[-1] ** -0.5)
        )
        if name == "embed" and sizes.likely_tokens:
            value[:FIRST_LIKELY] *= 0.02
            value[FIRST_LIKELY + sizes.likely_tokens :] *= 0.02
        dtype, data = _stored(value, precision)
        pieces.append(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path = root / "weights" / "weights.safetensors"
    path.parent.mkdir()
    with path.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for piece in pieces:
            stream.write(piece)
    for name, info in header.items():
        begin, end = info["data_offsets"]
        entries[name] = WeightEntry(
            "weights/weights.safetensors", 8 + len(head) + begin, end - begin, info["dtype"], list(shapes[name])
        )
    return entries


def write_tokenizer(folder: Path, *, adds_bos: bool = False, template: str | None = None) -> None:
    """TK: byte-level BPE with 256 byte tokens, no merges, and <bos>, <eos>, <|im_end|>."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tk = tokenizers.Tokenizer(model)
    tk.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = tokenizers.decoders.ByteLevel()
    tk.add_special_tokens(["<bos>", "<eos>", "<|im_end|>"])
    if adds_bos:
        tk.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    folder.mkdir(parents=True, exist_ok=True)
    tk.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_of(character: str) -> int:
    """The byte a character of the byte-level alphabet stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    code = ord(character)
    return code if code < 256 else others[code - 256]


def write_engine(root: Path, sizes: Sizes, *, upcast: bool = False) -> None:
    """Lowers the graphs of the bundle in `root`; half-precision weights are named, typed FLOAT, and not read."""
    bundle = Bundle.open(root)
    folder = root / "engines" / "ort-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    makers = {"target.onnx": _target_graph, "drafter_context.onnx": _context_graph, "drafter.onnx": _drafter_graph}
    graphs = [name for name in makers if name in bundle.manifest.files]
    for name in graphs:
        makers[name](sizes, bundle.manifest.weights, folder / name, True)
    source = {name: bundle.manifest.files[name].sha256 for name in graphs}
    given = sorted(bundle.manifest.weights) if upcast else ["embed"]
    version, files = HostEngineRecord.SCHEMA_VERSION, file_facts(folder, graphs)
    record = HostEngineRecord(version, "ort-cpu", source, files, "fp32", {}, {}, given, {}, upcast)
    write_record(folder / ENGINE_RECORD_NAME, record)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_bundle(
    root: Path,
    sizes: Sizes | None = None,
    *,
    drafter: bool = True,
    template: str | None = TEMPLATE,
    precision: str = "fp32",
) -> Path:
    """Writes a complete bundle with its engine and returns its folder."""
    sizes = sizes or Sizes()
    root.mkdir(parents=True)
    weights = _write_weights(sizes, drafter, root, precision)
    write_tokenizer(root / "tokenizer", template=template)
    target = _target_graph(sizes, weights, root / "target.onnx", False)
    facts = _drafter_facts(sizes, weights, root) if drafter else None
    names = [str(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        precision=precision,
        max_context_tokens=sizes.max_context,
        block_sizes=list(sizes.block_sizes),
        target=_target_facts(sizes, target),
        drafter=facts,
        taps=TapFacts(list(sizes.taps), "drafter"),
        text=TextFacts(list(sizes.stop_token_ids), BOS, template is not None, {}, {"bos_token": "<bos>"}),
        weights=weights,
        files=file_facts(root, names),
        checks=[],
        provenance=Provenance("0", [], {}),
    )
    write_record(root / "bundle.json", manifest)
    write_engine(root, sizes, upcast=precision != "fp32")
    return root


_SOURCE = SourceFacts("folder", "toy", None, "0" * 64)


def _target_facts(sizes: Sizes, graph: GraphFacts) -> TargetFacts:
    return TargetFacts(
        name="toy",
        source=_SOURCE,
        architecture="Toy",
        model_type="toy",
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        num_parameters=0,
        max_position_tokens=sizes.max_context + 256,
        embedding_weight="embed",
        head_weight="embed",
        graph=graph,
    )


def _drafter_facts(sizes: Sizes, weights: dict[str, WeightEntry], root: Path) -> DrafterFacts:
    return DrafterFacts(
        name="toy-drafter",
        source=_SOURCE,
        architecture="Toy",
        num_layers=sizes.drafter_layers,
        hidden_size=sizes.hidden,
        num_parameters=0,
        block_size=sizes.block_size,
        mask_token_id=sizes.mask_token,
        context_graph=_context_graph(sizes, weights, root / "drafter_context.onnx", False),
        graph=_drafter_graph(sizes, weights, root / "drafter.onnx", False),
    )
