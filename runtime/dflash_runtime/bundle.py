"""The bundle: files plus one manifest, `bundle.json`. This module alone reads and writes the manifest.

A bundle is the contract between export, engines and runtime:

    bundle.json   target.onnx   drafter_context.onnx   drafter.onnx
    weights/      tokenizer/    reference/             engines/<device tag>/       ranges.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from dflash_runtime.errors import BundleError, EngineError

SCHEMA_VERSION = 2
MANIFEST_NAME = "bundle.json"

STATE_KINDS = ("kv", "windowed_kv")
Record = TypeVar("Record")
GraphKind = Literal["target", "drafter_context", "drafter"]


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """One input or output of a graph."""

    name: str
    dtype: str
    """Safetensors spelling: F32, F16, BF16, I64, ..."""
    shape: list[int | str]
    """Integers are fixed; strings are the letters B, S, T, R, b of the graph contract."""

    def array_form(self, rows: int) -> tuple[list[int], str]:
        """Sizes of what comes out for `rows` rows, without the batch, and NumPy's name of the type, floats in fp32."""
        return [rows if isinstance(d, str) else d for d in self.shape[1:]], "i8" if self.dtype == "I64" else "f4"


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor that lives from call to call, and how a rejected draft is taken back from it."""

    input: str
    output: str
    kind: str
    """`kv`, or `windowed_kv` where attention sees only the last `window_tokens` rows."""
    shape: list[int | str]
    """[B, kv_heads, T, head_dim]"""
    window_tokens: int | None
    rollback: str
    """`length`: rows at and past the length are dead and the next write replaces them."""

    def cache_shape(self, capacity_rows: int) -> tuple[int, int, int, int]:
        """The shape with its letters filled in; EngineError for a kind of state this runtime does not keep."""
        sizes = [{"B": 1, "T": capacity_rows}.get(d) if isinstance(d, str) else d for d in self.shape]
        if self.kind not in STATE_KINDS or self.rollback != "length" or len(sizes) != 4 or None in sizes:
            raise EngineError(f"State {self.input} is {self.kind!r} {self.shape} with rollback {self.rollback!r}; this "
                              f"version keeps {' and '.join(STATE_KINDS)} with 'length'. Update.")
        return typing.cast("tuple[int, int, int, int]", tuple(sizes))


@dataclasses.dataclass(frozen=True)
class GraphFacts:
    """One ONNX file with its interface; state tensors are listed once, in `state`."""

    file: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]
    state: list[StateTensor]


@dataclasses.dataclass(frozen=True)
class SourceFacts:
    """Where a checkpoint came from."""

    kind: str
    """`folder`, `hub`, or `package` for one that comes with this program."""
    id: str
    revision: str | None
    config_sha256: str


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """The model that decides."""

    name: str
    source: SourceFacts
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_parameters: int
    max_position_tokens: int
    embedding_weight: str
    """Name of the embedding table in the weight index, [V, H]."""
    head_weight: str
    """Name of the output head in the weight index, [V, H]; `embedding_weight` where it is tied."""
    graph: GraphFacts


@dataclasses.dataclass(frozen=True)
class DrafterFacts:
    """The block-diffusion model that proposes."""

    name: str
    source: SourceFacts
    architecture: str
    num_layers: int
    hidden_size: int
    num_parameters: int
    block_size: int
    """Tokens in one block the drafter was trained for, anchor included."""
    mask_token_id: int
    context_graph: GraphFacts
    graph: GraphFacts


@dataclasses.dataclass(frozen=True)
class TapFacts:
    """Which layers' raw outputs the target hands out, in the order they are concatenated."""

    layer_ids: list[int]
    """0-based decoder layers; an id is the output of that layer (Hugging Face hidden_states[id + 1])."""
    origin: str
    """`drafter` (its config states them) or `default` (the default rule, no drafter yet)."""


@dataclasses.dataclass(frozen=True)
class TextFacts:
    """Facts about turning text into tokens that belong to the pair."""

    stop_token_ids: list[int]
    bos_token_id: int | None
    has_chat_template: bool
    """It is in tokenizer/chat_template.jinja, wherever the checkpoint had it."""
    template_args: dict[str, Any]
    """Arguments the chat template gets by default, such as {"enable_thinking": false}."""
    special_tokens: dict[str, str]
    """What a template may call `bos_token`, `eos_token`, ..."""


@dataclasses.dataclass(frozen=True)
class WeightEntry:
    """Where one weight lies."""

    file: str
    offset_bytes: int
    length_bytes: int
    dtype: str
    """Safetensors spelling, and U4 for unsigned integers of four bits, two in a byte, the first in the low half."""
    shape: list[int]


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """How a weight [out, in] is held as small unsigned integers: weight = (value - zero point) * scale.

    The values lie in the weight index under the weight's own name. Signed values are stored with half their range
    added, so that the zero point of a symmetric weight is 8 or 128; that is how ONNX Runtime's kernels read them.
    Where the index says F8_E4M3 they are floats of eight bits, and weight = value * scale.
    """

    bits: int
    """4 or 8."""
    group_size: int | None
    """Inputs that share a scale, scales are [out, in / group_size]; None for one scale a row, scales are [out]."""
    scales: str
    """Name in the weight index."""
    zero_points: str | None
    """Name in the weight index, same shape as the scales; None where it is 8 or 128 throughout."""
    origin: str
    """`round-to-nearest`, or the format of the checkpoint it was taken from as it is."""


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Size and hash of one file."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One line of the parity table."""

    stage: str
    """`portable` (against PyTorch), `lowered` (against portable), `tokens`, ..."""
    tensor: str
    worst: float
    """Largest deviation seen, relative to the reference's scale; for `tokens` the number that differ."""
    tolerance: float
    passed: bool
    covered: str
    """What was run, in words: lengths, layers, prompts."""


@dataclasses.dataclass(frozen=True)
class Provenance:
    """How the bundle was made."""

    tool_version: str
    argv: list[str]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything `bundle.json` says."""

    schema_version: int
    precision: str
    """fp32, fp16 or bf16: the dtype of weights and graphs. Execution may choose another one."""
    max_context_tokens: int
    """Most rows a request may commit to the KV cache."""
    block_sizes: list[int]
    """Block sizes engines are made for, ascending; the runtime may use any size up to the largest."""
    target: TargetFacts
    drafter: DrafterFacts | None
    taps: TapFacts
    text: TextFacts
    weights: dict[str, WeightEntry]
    files: dict[str, FileFacts]
    checks: list[CheckRow]
    provenance: Provenance
    quantized: dict[str, QuantizedWeight] = dataclasses.field(default_factory=dict)
    """The weights held as small integers, by name; the others are of the bundle's precision."""

    def graph_files(self) -> dict[GraphKind, str]:
        """File of each portable graph: target, then drafter_context and drafter where there is one."""
        files: dict[GraphKind, str] = {"target": self.target.graph.file}
        if self.drafter is not None:
            files |= {"drafter_context": self.drafter.context_graph.file, "drafter": self.drafter.graph.file}
        return files


def read_record(kind: type[Record], path: Path, schema_version: int) -> Record:
    """Reads a JSON file with a `schema_version` strictly as the dataclass `kind`.

    Raises:
        BundleError: not JSON, another schema, an unknown or a missing key, a value of the wrong type.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is no valid JSON ({error}). Copy or build it again.") from error
    if (version := data.get("schema_version") if isinstance(data, dict) else None) != schema_version:
        raise BundleError(f"{path} has schema version {version}, this program reads {schema_version}. Build it again, "
                          "or update dflash-export where it is newer.")
    return typing.cast(Record, decode(kind, data, str(path)))


def decode(kind: Any, data: Any, where: str) -> Any:
    """Builds a value of type `kind` from JSON data, refusing unknown keys and wrong types.

    A kind is a dataclass, `list[...]`, `dict[str, ...]`, a union, or a plain JSON type.

    Raises:
        BundleError: naming the place, `where`, and both types.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        if unknown := sorted(data.keys() - hints.keys()):
            raise BundleError(f"{where} has unknown keys {unknown}. A newer dflash-export wrote it: update.")
        if missing := sorted(hints.keys() - data.keys()):
            raise BundleError(f"{where} lacks the keys {missing}. Copy or build the bundle again.")
        values = {key: decode(hint, data[key], f"{where}.{key}") for key, hint in hints.items()}
        return typing.cast(Any, kind)(**values)
    if origin is list and isinstance(data, list):
        return [decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: decode(args[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin in (typing.Union, types.UnionType):
        return data if type(data) in args else decode(args[0], data, where)  # `None` is last
    if kind is Any or (kind is float and type(data) is int) or type(data) is kind:
        return data
    wanted = "an object" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", str(kind))
    raise BundleError(f"{where} should be {wanted} and is {type(data).__name__}.")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle on disk: its folder and its facts."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check_files: bool = True) -> Bundle:
        """Reads the manifest of the bundle in folder `path` and checks its files, see `check_files`.

        Raises:
            BundleError: no bundle there, or a file is missing or altered.
        """
        folder = Path(path)
        manifest_path = folder / MANIFEST_NAME
        if not manifest_path.is_file():
            remedy = "Make one with: dflash-export build --target TARGET --out DIR"
            raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_NAME}. {remedy}")
        bundle = cls(folder, read_record(Manifest, manifest_path, SCHEMA_VERSION))
        if check_files:
            bundle.check_files()
        return bundle

    def file(self, name: str) -> Path:
        """Path of a file of the bundle.

        Raises:
            BundleError: the name leads outside the bundle.
        """
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not name or "\\" in name:
            raise BundleError(f"{self.path / MANIFEST_NAME} names {name!r}, which lies outside the bundle.")
        return self.path / name

    def check_files(self, *, full: bool = False) -> list[str]:
        """Compares every file with the manifest.

        Sizes are always compared. Hashes are computed when this copy (path, size, modification time)
        has not been hashed before, or when `full`.

        Returns:
            The names that were hashed in this call.

        Raises:
            BundleError: naming every file that is missing, short or altered.
        """
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, TypeError, ValueError):  # an unreadable cache only means hashing again
            known = {} if full else dict(json.loads(self._stamp_path().read_text(encoding="utf-8")))
        paths = {name: self.file(name) for name in self.manifest.files}
        problems, stamps = compare_files(paths, self.manifest.files, known)
        hashed = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        if problems:
            raise BundleError(f"{self.path}: " + "; ".join(problems) + ". Copy or build the bundle again.")
        if hashed:
            with contextlib.suppress(OSError):  # a read-only home costs one more hash at the next start, nothing else
                self._stamp_path().parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._stamp_path(), json.dumps(stamps))
        return hashed

    def cache_key(self) -> str:
        """What this copy of the bundle is called in the cache folder."""
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:32]

    def _stamp_path(self) -> Path:
        return cache_root() / "checked" / f"{self.cache_key()}.json"


def cache_root() -> Path:
    """Where this program keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-export"


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal, read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def file_facts(root: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Size and hash of the named files below `root`."""
    return {name: FileFacts((root / name).stat().st_size, sha256_of(root / name)) for name in sorted(names)}


def compare_files(
    paths: Mapping[str, Path], expected: Mapping[str, FileFacts], known: Mapping[str, Any]
) -> tuple[list[str], dict[str, list[Any]]]:
    """Compares files with what they should be: the problems in words, and a stamp for each file that is there.

    A file whose stamp is in `known` has been hashed before and is not hashed again.
    """
    problems, stamps = [], {}
    for name, facts in expected.items():
        if not paths[name].is_file():
            problems.append(f"{name} is missing")
            continue
        status = paths[name].stat()
        stamps[name] = [facts.sha256, status.st_size, status.st_mtime_ns]
        if status.st_size != facts.size_bytes:
            problems.append(f"{name} is incomplete or altered ({status.st_size} bytes instead of {facts.size_bytes})")
        elif known.get(name) != stamps[name] and sha256_of(paths[name]) != facts.sha256:
            problems.append(f"{name} was altered (its sha256 differs)")
    return problems, stamps


def write_record(path: Path, record: Any) -> None:
    """Writes a dataclass as JSON, atomically; `read_record` reads it."""
    write_atomically(path, json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=False) + "\n")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file, text in UTF-8, under a temporary name beside `path`, then replaces `path` with it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
