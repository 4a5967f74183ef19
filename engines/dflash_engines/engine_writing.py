"""Writes a folder of lowered graphs under a temporary name, complete with its record, then puts it in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from dflash_engines.engine_place import replace_folder
from dflash_runtime.bundle import Bundle, Manifest, file_facts, write_record
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, EngineRecord, HostEngineRecord, engine_folder
from dflash_runtime.errors import OutputError
from dflash_runtime.window_rings import Ring

AnyRecord = TypeVar("AnyRecord", bound=EngineRecord)


def write_engine(bundle: Bundle, backend: str, graphs: Mapping[str, ir.Model],
                 make_record: Callable[[Path], AnyRecord]) -> AnyRecord:
    """Replaces the engine of a backend by new graphs.

    An engine that is there stays usable until the new one is complete.

    Args:
        bundle: Where `engines/<backend>` lies.
        backend: Name of the backend.
        graphs: Lowered model by file name.
        make_record: Given the folder the graphs are in by then.

    Raises:
        OutputError: the folder cannot be written.
    """
    folder = engine_folder(bundle, backend)
    partial = folder.with_name(f".{backend}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, model in graphs.items():
            (partial / name).write_bytes(ir.to_proto(model).SerializeToString())
        record = make_record(partial)
        write_record(partial / ENGINE_RECORD_NAME, record)
        replace_folder(partial, folder)
    except OSError as error:
        raise OutputError(
            f"The engine cannot be written to {folder}: {error}. Make the folder writable and see that the disk has "
            "room, then run: dflash-export engines " + str(bundle.path)
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return record


def host_record(bundle: Bundle, backend: str, names: Sequence[str], versions: dict[str, str], precision: str,
                rings: dict[str, Ring], folder: Path) -> HostEngineRecord:
    """The record of graphs for the CPU; each has the name of the portable graph it was made from."""
    return HostEngineRecord(
        schema_version=HostEngineRecord.SCHEMA_VERSION,
        backend=backend,
        source={name: bundle.manifest.files[name].sha256 for name in names},
        files=file_facts(folder, names),
        folded_weights={name: _folded_weights(ir.load(folder / name).graph, bundle) for name in names},
        execution_precision=precision,
        versions=versions,
        upcast=bundle.manifest.precision != precision,
        given_weights=sorted(weights_given_by_name(bundle.manifest, upcast=bundle.manifest.precision != precision)),
        rings=rings,
    )


def weights_given_by_name(manifest: Manifest, *, upcast: bool) -> set[str]:
    """Float weights a session of ONNX Runtime is given by name, so that all sessions share them.

    Args:
        manifest: Of the bundle.
        upcast: Execution is in float32 and half-precision weights must be widened first.
    """
    halves = {name for name, entry in manifest.weights.items() if upcast and entry.dtype in ("F16", "BF16")}
    return halves | {manifest.target.embedding_weight, manifest.target.head_weight} - manifest.quantized.keys()


def _folded_weights(graph: ir.Graph, bundle: Bundle) -> list[str]:
    """Weights given by name that a node without other inputs makes constants of when a session opens."""
    given, found = weights_given_by_name(bundle.manifest, upcast=True), set[str]()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if all(_is_constant(value) for value in inputs):
            found |= {str(value.name) for value in inputs if value.name in given}
    return sorted(found)


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")
