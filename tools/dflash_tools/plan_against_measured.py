"""A plan's sums against what a bundle and a session take: `python -m dflash_tools.plan_against_measured BUNDLE`.

The plan is made from the config files the bundle was built from, never from the bundle's own list of weights, so that
the two can differ. Weights and caches must agree within 3 %; engines and resident memory are told, not judged.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle, SourceFacts, sha256_of
from dflash_runtime.errors import CheckpointError
from dflash_tools import plan_formulas as formulas
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.drafter_shape import read_drafter_shape
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand, needs_extra
from dflash_tools.model_shape import DrafterShape, ModelShape
from dflash_tools.plan_sources import find_config
from dflash_tools.session_bytes import SessionBytes, measure_session
from dflash_tools.sizes import bytes_text

TOLERANCE = 0.03


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, target: str | None, drafter: str | None, threads: int | None, as_json: bool) -> None:
    """Compares what the plan says of BUNDLE with its files and with an ort-cpu session; exit code 1 over 3 %."""
    opened = Bundle.open(bundle)
    shape, drafter_shape = plan_shapes(opened, target, drafter)
    with needs_extra("ort"):
        measured = measure_session(opened, threads)
    rows = list(compare(opened, shape, drafter_shape, measured))
    passed = all(row.passed for row in rows)
    if as_json:
        facts = [{**dataclasses.asdict(row), "difference": row.difference, "passed": row.passed} for row in rows]
        click.echo(json.dumps({"tolerance": TOLERANCE, "passed": passed, "items": facts}))
    else:
        for line in _lines(rows):
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
    storage, executed = formulas.Storage(manifest.precision, manifest.precision), formulas.Storage("fp32", "fp32")
    files = _weight_file_bytes(bundle)
    capacity = formulas.capacity_tokens(manifest.max_context_tokens, manifest.block_sizes)
    kv = formulas.kv_bytes(shape, capacity, executed.item_bytes)
    in_memory = formulas.model_bytes(shape, executed) + kv
    yield Comparison("target weight files", formulas.model_bytes(shape, storage), files["target"], True)
    yield Comparison("target KV cache", kv, measured.target_kv_bytes, True)
    if drafter is not None:
        drafter_kv = formulas.kv_bytes(drafter.body, capacity, executed.item_bytes)
        in_memory += formulas.drafter_bytes(drafter, executed) + drafter_kv
        yield Comparison("drafter weight files", formulas.drafter_bytes(drafter, storage), files["drafter"], True)
        yield Comparison("drafter KV cache", drafter_kv, measured.drafter_kv_bytes, True)
    engines = formulas.ort_engine_bytes(shape, drafter)
    yield Comparison("engine files", engines, measured.engine_bytes, False)
    yield Comparison("session: weights in fp32 and KV", in_memory, measured.resident_growth_bytes, False)


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


def _lines(rows: list[Comparison]) -> Iterator[str]:
    yield f"{'item':<33}{'planned':>11}{'real':>11}{'difference':>12}"
    for row in rows:
        word = "" if not row.judged else "  ok" if row.passed else f"  FAILED: over {TOLERANCE:.0%}"
        sizes = f"{bytes_text(row.planned_bytes):>11}{bytes_text(row.real_bytes):>11}"
        yield f"{row.name:<33}{sizes}{row.difference:>+11.2%}{word}"


if __name__ == "__main__":
    main()
