"""Writes the graphs of `tiny_graphs` as a bundle whose manifest says what lowering needs."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model, target_model

from dflash_runtime.bundle import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DrafterFacts,
    GraphFacts,
    Manifest,
    Provenance,
    SourceFacts,
    TapFacts,
    TargetFacts,
    TextFacts,
    WeightEntry,
    file_facts,
    write_record,
)

GRAPHS = ("target.onnx", "drafter_context.onnx", "drafter.onnx")


def write_small_bundle(root: Path, precision: str) -> Path:
    causal, drafter = Sizes(precision=precision), Sizes(precision=precision, layers=(Layer(causal=False),) * 2)
    made = (target_model(causal), drafter_context_model(drafter), drafter_model(drafter))
    models = dict(zip(GRAPHS, made, strict=True))
    (root / "weights").mkdir(parents=True)
    for name, model in models.items():
        ir.save(model, root / name, external_data=f"weights/{Path(name).stem}.bin", size_threshold_bytes=200)
    write_manifest(root, precision)
    return root


def write_manifest(root: Path, precision: str) -> None:
    """States the files as they are now."""
    source = SourceFacts("folder", "tiny", None, "0" * 64)
    graphs = [GraphFacts(name, [], [], []) for name in GRAPHS]
    sizes = Sizes()
    names = [path.relative_to(root).as_posix() for folder in (root, root / "weights") for path in folder.glob("*.*")]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        precision=precision,
        max_context_tokens=32,
        block_sizes=[1, 4],
        target=TargetFacts(
            "tiny", source, "Tiny", "tiny", 2, sizes.hidden, sizes.vocab, 1, 32, "embed", "embed", graphs[0]
        ),
        drafter=DrafterFacts("tiny", source, "Tiny", 2, sizes.hidden, 1, 4, 60, graphs[1], graphs[2]),
        taps=TapFacts([0, 1], "drafter"),
        text=TextFacts([0], None, False, {}, {}),
        weights=_weights(root),
        files=file_facts(root, [name for name in names if name != MANIFEST_NAME]),
        checks=[],
        provenance=Provenance("0", [], {}),
    )
    write_record(root / MANIFEST_NAME, manifest)


def _weights(root: Path) -> dict[str, WeightEntry]:
    spelling, found = {"FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}, {}
    for name in GRAPHS:
        for tensor in (value.const_value for value in ir.load(root / name).graph.initializers.values()):
            if isinstance(tensor, ir.ExternalTensor):
                dtype, shape = spelling[tensor.dtype.name], [int(size) for size in tensor.shape]
                file, offset = Path(tensor.location).as_posix(), tensor.offset or 0
                found[str(tensor.name)] = WeightEntry(file, offset, tensor.nbytes, dtype, shape)
    return found
