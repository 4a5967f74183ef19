"""A plan's sums against what a bundle and a session take: `python -m dflash_tools.plan_against_measured BUNDLE`.

The plan is made from the config files the bundle was built from, never from the bundle's own list of weights, so that
the two can differ. With an `ort-cpu` session weights and caches must agree within 3 %; engines and resident memory are
told, not judged. With `--engines`, the engines of a GPU, nothing is opened, and the sum of weights on the device,
caches and engines must agree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle, Manifest, SourceFacts, sha256_of
from dflash_runtime.device_engine import BoundWeight, DeviceEngineRecord
from dflash_runtime.errors import CheckpointError
from dflash_runtime.weights import FLOAT8_TRANSPOSED, SIGNED_TRANSPOSED
from dflash_tools import plan_formulas as formulas
from dflash_tools.bundle_shape import stored_form
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.drafter_shape import read_drafter_shape
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand, needs_extra
from dflash_tools.model_shape import DrafterShape, ModelShape
from dflash_tools.plan_sources import find_config
from dflash_tools.ring_lines import DRAFT_WINDOW
from dflash_tools.session_bytes import SessionBytes, measure_session
from dflash_tools.sizes import bytes_text
from dflash_tools.weight_bytes import (
    DEFAULT_GROUP_SIZE,
    ITEM_BYTES,
    Storage,
    drafter_bytes,
    given_bytes,
    held_bytes,
    model_bytes,
)

TOLERANCE = 0.03
ROUNDED = "round-to-nearest"
"""Origin of weights that a build has quantised."""
BOUND_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, SIGNED_TRANSPOSED: 1, FLOAT8_TRANSPOSED: 1}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One item."""

    name: str
    planned_bytes: int
    real_bytes: int
    judged: bool
    """Whether it must agree."""

    @property
    def difference(self) -> float:
        """Real over planned, minus one."""
        return self.real_bytes / self.planned_bytes - 1

    @property
    def passed(self) -> bool:
        """Within the tolerance, or not judged."""
        return not self.judged or abs(self.difference) <= TOLERANCE


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", help="Checkpoint the bundle was built from. [default: where the bundle says it lay]")
@click.option("--drafter", help="The same for its drafter.")
@click.option("--threads", type=click.IntRange(1), help="[default: ONNX Runtime chooses]")
@click.option("--engines", type=click.Path(path_type=Path), help="Folder of a GPU's engines, to compare with instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, target: str | None, drafter: str | None, threads: int | None, engines: Path | None, as_json: bool
) -> None:
    """Compares what the plan says of BUNDLE with its files and with an ort-cpu session; exit code 1 over 3 %."""
    opened = Bundle.open(bundle)
    shape, drafter_shape = plan_shapes(opened, target, drafter)
    if engines is None:
        with needs_extra("ort"):
            measured = measure_session(opened, threads)
        rows = list(compare(opened, shape, drafter_shape, measured))
    else:
        record = DeviceEngineRecord.read(engines, f"Run: dflash-export engines {bundle} --backend BACKEND")
        rows = list(compare_engines(opened, shape, drafter_shape, record))
    passed = all(row.passed for row in rows)
    if as_json:
        facts = [{**dataclasses.asdict(row), "difference": row.difference, "passed": row.passed} for row in rows]
        click.echo(json.dumps({"tolerance": TOLERANCE, "passed": passed, "items": facts}))
    else:
        for line in comparison_lines(rows):
            click.echo(line)
    if not passed:
        sys.exit(EXIT_REFUSED)


def plan_shapes(
    bundle: Bundle, target: str | None = None, drafter: str | None = None
) -> tuple[ModelShape, DrafterShape | None]:
    """The sizes of a bundle's models by the config files it was built from.

    Raises:
        CheckpointError: a config is no longer there, or not the one of the bundle.
    """
    facts = bundle.manifest
    shape = read_model_shape(_config(facts.target.source, target, "target"), facts.target.name)
    if facts.drafter is None:
        return shape, None
    config = _config(facts.drafter.source, drafter, "drafter")
    return shape, read_drafter_shape(config, shape, facts.drafter.name)


def compare(
    bundle: Bundle, shape: ModelShape, drafter: DrafterShape | None, measured: SessionBytes
) -> Iterator[Comparison]:
    """Planned and real bytes of each item."""
    manifest = bundle.manifest
    storage, drafter_storage = stored_as(manifest, "target"), stored_as(manifest, "drafter")
    executed, drafter_executed = executed_on_cpu(storage), executed_on_cpu(drafter_storage)
    files = _weight_file_bytes(bundle)
    capacity = formulas.capacity_tokens(manifest.max_context_tokens, manifest.block_sizes)
    kv = formulas.kv_bytes(shape, capacity, executed.item_bytes)
    in_memory = model_bytes(shape, executed) + kv
    yield Comparison("target weight files", model_bytes(shape, storage), files["target"], True)
    yield Comparison("target KV cache", kv, measured.target_kv_bytes, True)
    if drafter is not None:
        drafter_kv = formulas.drafter_kv_bytes(
            drafter.body, manifest.max_context_tokens, manifest.block_sizes, executed.item_bytes)  # fmt: skip
        in_memory += drafter_bytes(drafter, drafter_executed) + drafter_kv
        yield Comparison("drafter weight files", drafter_bytes(drafter, drafter_storage), files["drafter"], True)
        yield Comparison("drafter KV cache", drafter_kv, measured.drafter_kv_bytes, True)
    engines = formulas.ort_engine_bytes(shape, drafter)
    yield Comparison("engine files", engines, measured.engine_bytes, False)
    yield Comparison("session: weights and KV", in_memory, measured.resident_growth_bytes, False)


def compare_engines(
    bundle: Bundle, shape: ModelShape, drafter: DrafterShape | None, record: DeviceEngineRecord
) -> Iterator[Comparison]:
    """The same for engines of a GPU: what they are given and what they hold is told, the sum is judged."""
    from dflash_engines.tensorrt_versions import cache_layouts

    manifest = bundle.manifest
    storage, drafter_storage = stored_as(manifest, "target"), stored_as(manifest, "drafter")
    item_bytes = ITEM_BYTES[record.execution_precision]
    capacity = formulas.capacity_tokens(manifest.max_context_tokens, manifest.block_sizes, record.prefill_chunk_tokens)
    kv, states = formulas.kv_bytes(shape, capacity, item_bytes), [*manifest.target.graph.state]
    if drafter is not None and manifest.drafter is not None:
        window = record.versions.get(DRAFT_WINDOW)
        kv += formulas.drafter_kv_bytes(
            drafter.body, manifest.max_context_tokens, manifest.block_sizes, item_bytes,
            prefill_chunk=record.prefill_chunk_tokens, draft_window=None if window is None else int(window),
        )  # fmt: skip
        states += manifest.drafter.context_graph.state
    held, held_again = held_bytes(shape, drafter, storage, drafter_storage)
    of_target = len(manifest.target.graph.state)
    rows = [record.capacity_rows] * of_target + [
        record.rings[state.input].rows if state.input in record.rings else record.capacity_rows
        for state in states[of_target:]
    ]
    real_kv = sum(math.prod(s.cache_shape(size)) for s, size in zip(states, rows, strict=True)) * item_bytes
    real_engines = sum(facts.size_bytes for facts in record.files.values())
    layouts = [] if record.form == "fused" else cache_layouts("primitive", record.capacity_rows)
    engines = formulas.engine_bytes(shape, drafter, record.block_sizes, layouts) + held + held_again
    given = given_bytes(shape, drafter, storage, drafter_storage)
    bound = [weight for engine in record.engines for weight in engine.weights]
    found = [
        Comparison("weights given to engines", given, bound_bytes(manifest, bound), False),
        Comparison("KV caches", kv, real_kv, False),
        Comparison("engine files, what they hold included", engines, real_engines, False),
    ]
    yield from found
    yield Comparison("sum", sum(f.planned_bytes for f in found), sum(f.real_bytes for f in found), True)


def bound_bytes(manifest: Manifest, bound: Iterable[BoundWeight]) -> int:
    """Device memory of the weights that engines take as inputs, each once for every dtype."""
    wanted = {(weight.weight, weight.dtype) for weight in bound}
    return sum(math.prod(manifest.weights[name].shape) * BOUND_ITEM_BYTES[dtype] for name, dtype in wanted)


def stored_as(manifest: Manifest, role: str) -> Storage:
    """How a build was asked to store a model's layers and tables, by the bundle's own list of quantised weights.

    What a checkpoint brought quantised is not looked at: its config says so, and what is planned from it has that form.
    """
    target = manifest.target
    tables = {target.embedding_weight, target.head_weight}
    rounded = {n: stored_form(manifest, n) for n, facts in manifest.quantized.items() if facts.origin == ROUNDED}
    layers = [f for n, f in rounded.items() if n not in tables and n.startswith("drafter.") == (role == "drafter")]
    own, head = next(iter(layers), None), rounded.get(target.head_weight)
    kind = manifest.precision if own is None else own.kind
    grouped = next((form for form in (own, head) if form is not None and form.kind == "int4"), None)
    if role == "drafter":
        head = own  # of a vocabulary of its own; a borrowed one is the target's
    return Storage(
        kind, manifest.precision if head is None else head.kind,
        DEFAULT_GROUP_SIZE if grouped is None or grouped.group_size is None else grouped.group_size,
        grouped is None or grouped.symmetric, manifest.precision,
    )  # fmt: skip


def executed_on_cpu(storage: Storage) -> Storage:
    """What an ort-cpu session makes of it: floats and FP8 are widened, integers stay."""
    layers, tables = ("fp32" if kind not in ("int8", "int4") else kind for kind in (storage.matrices, storage.tables))
    return Storage(layers, tables, storage.group_size, storage.symmetric, "fp32")


def _config(source: SourceFacts, given: str | None, role: str) -> dict[str, Any]:
    reference = given or (source.id if source.revision is None else f"{source.id}@{source.revision}")
    try:
        path, _ = find_config(reference, role)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give the checkpoint the bundle was built from with --{role}.") from error
    digest = sha256_of(path)
    if digest != source.config_sha256:
        raise CheckpointError(
            f"{path} has sha256 {digest[:12]}, the bundle's {role} was built from {source.config_sha256[:12]}. "
            f"Give the checkpoint the bundle was built from with --{role}."
        )
    from dflash_export.json_file import read_json

    return read_json(path)


def _weight_file_bytes(bundle: Bundle) -> dict[str, int]:
    """Sizes on disk of the files that hold the target's and the drafter's weights, headers included."""
    files: dict[str, set[str]] = {"target": set(), "drafter": set()}
    for name, entry in bundle.manifest.weights.items():
        files["drafter" if name.startswith("drafter.") else "target"].add(entry.file)
    files["drafter"] -= files["target"]
    return {role: sum(bundle.file(name).stat().st_size for name in names) for role, names in files.items()}


def comparison_lines(rows: list[Comparison]) -> Iterator[str]:
    """A table for a person."""
    yield f"{'item':<33}{'planned':>11}{'real':>11}{'difference':>12}"
    for row in rows:
        word = "" if not row.judged else "  ok" if row.passed else f"  FAILED: over {TOLERANCE:.0%}"
        sizes = f"{bytes_text(row.planned_bytes):>11}{bytes_text(row.real_bytes):>11}"
        yield f"{row.name:<33}{sizes}{row.difference:>+11.2%}{word}"


if __name__ == "__main__":
    main()
