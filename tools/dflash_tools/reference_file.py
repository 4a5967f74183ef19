"""A reference with its numbers: one `.npz` file, read without pickle and without torch, in a bundle or beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from dflash_export.deviation import deviation
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, FileFacts, Manifest, decode, write_record
from dflash_runtime.errors import BundleError, OutputError
from dflash_tools.reference_record import REFERENCE_SCHEMA_VERSION, ReferenceFacts, quantization_of
from dflash_tools.reference_tensors import Array, is_choice, is_output, sketch

FOLDER = "reference"
_FACTS = "facts"


@dataclasses.dataclass(frozen=True)
class Reference:
    """Facts and numbers.

    Arrays are named `{call}/{tensor}`, `text{n}/...` for what belongs to a text: `taps` [R, K*H], `top_ids` and
    `top_logits` [tokens, k], `draft_top_ids` and `draft_top_logits` [rounds, b - 1, k], `context/{tensor}`.
    """

    facts: ReferenceFacts
    arrays: dict[str, Array]

    def expected(self, key: str) -> Array:
        """What is kept under a name: rows, or their sketches.

        Raises:
            BundleError: the file lacks it.
        """
        if key not in self.arrays:
            raise BundleError(f"The reference has no numbers for {key}. Make it again: dflash-export reference BUNDLE")
        return self.arrays[key]

    def is_sketched(self, name: str) -> bool:
        """Whether only sketches of a tensor's rows are kept."""
        return not is_choice(name) and ("outputs" if is_output(name) else "inner") in self.facts.sketched

    def row_deviations(self, key: str, name: str, found: Array) -> Array:
        """Relative deviation of each row of a tensor, infinite where it is not finite or of another shape.

        Args:
            key: Under which the numbers are kept.
            name: The tensor's name.
            found: [R, N] of an engine; with fewer rows, the first ones are compared.
        """
        expected = self.expected(key)[: len(found)]
        if len(expected) != len(found):
            return np.full(len(found), np.inf)
        if is_choice(name):
            wrong: Array = (found != expected).any(-1).astype(np.float64)
            return wrong
        seen = sketch(found) if self.is_sketched(name) else found
        rows = [
            deviation(seen[r : r + 1], expected[r : r + 1]) if np.isfinite(found[r]).all() else np.inf
            for r in range(len(found))
        ]
        return np.array(rows, np.float64)


def write_reference(reference: Reference, folder: Path) -> Path:
    """Writes the file under a name that carries its hash, so that it never stands in for another one.

    Raises:
        OutputError: the folder cannot be written.
    """
    facts = json.dumps(dataclasses.asdict(reference.facts), ensure_ascii=False).encode()
    temporary = folder / f".reference.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            arrays: dict[str, Any] = {_FACTS: np.frombuffer(facts, np.uint8), **reference.arrays}
            np.savez(stream, **arrays)
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        place = folder / f"reference-{digest[:12]}.npz"
        temporary.replace(place)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written ({error.strerror or error}). Give another folder: "
            "dflash-export reference BUNDLE --out FOLDER"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return place


def add_to_bundle(bundle: Bundle, reference: Reference) -> Path:
    """Puts a reference into a bundle: the file first, then the manifest that names it, then the old one goes.

    A process killed in between leaves a bundle that opens.

    Raises:
        OutputError: the bundle is read-only; the message names the way around.
    """
    require_writable(bundle)
    place = write_reference(reference, bundle.path / FOLDER)
    name = place.relative_to(bundle.path).as_posix()
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    old = [one for one in bundle.manifest.files if one.startswith(f"{FOLDER}/") and one != name]
    files = {key: facts for key, facts in bundle.manifest.files.items() if key not in old}
    files[name] = FileFacts(place.stat().st_size, digest)
    manifest = dataclasses.replace(bundle.manifest, files=dict(sorted(files.items())))
    write_record(bundle.path / MANIFEST_NAME, manifest)
    for one in old:
        bundle.file(one).unlink(missing_ok=True)
    return place


def require_writable(bundle: Bundle, beside: Path | None = None) -> None:
    """Refuses a place where a reference cannot be stored, before it is computed.

    Args:
        bundle: In which it is stored.
        beside: The folder that takes it instead.

    Raises:
        OutputError: naming the way around.
    """
    if beside is not None:
        existing = next(one for one in (beside.absolute(), *beside.absolute().parents) if one.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise OutputError(f"{existing} is no folder that can be written to. Give another --out FOLDER.")
    elif not os.access(bundle.path, os.W_OK):
        raise OutputError(
            f"{bundle.path} is read-only, so a reference cannot be stored in it. Put it beside: "
            f"dflash-export reference {bundle.path} --out FOLDER"
        )


def require_fitting(reference: Reference, bundle: Bundle) -> None:
    """Refuses a reference of another pair, precision or size, such as one made before the drafter was added.

    Raises:
        BundleError: naming what differs.
    """
    facts, manifest = reference.facts, bundle.manifest
    drafter = None if manifest.drafter is None else manifest.drafter.source.config_sha256
    problems = [
        f"it was made for {what} {made}, the bundle has {here}"
        for what, made, here in (
            ("precision", facts.precision, manifest.precision),
            ("a target of config", facts.config_sha256[:12], manifest.target.source.config_sha256[:12]),
            ("a drafter of config", str(facts.drafter_config_sha256)[:12], str(drafter)[:12]),
        )
        if made != here
    ]
    here = quantization_of(manifest)
    other = next((n for n in sorted(facts.quantized.keys() | here) if facts.quantized.get(n) != here.get(n)), None)
    if other is not None:
        made, held = (held.get(other, "not quantised") for held in (facts.quantized, here))
        problems.append(f"it was made for {other} as {made}, the bundle has it as {held}")
    problems += _beyond(facts, manifest)
    if problems:
        raise BundleError(
            f"The reference does not fit {bundle.path}: {'; '.join(problems)}. Make it again: "
            f"dflash-export reference {bundle.path}"
        )


def _beyond(facts: ReferenceFacts, manifest: Manifest) -> list[str]:
    """What a reference does that a bundle of the same pair was not built for."""
    block = max((text.block_size for text in facts.texts), default=1)
    rows = max((facts.calls[text.whole_call].rows for text in facts.texts), default=0)
    most, context = max(manifest.block_sizes), manifest.max_context_tokens
    problems = [f"it drafts blocks of {block} tokens, the bundle of at most {most}"] if block > most else []
    return problems + ([f"its texts have {rows} tokens, the bundle's context {context}"] if rows > context else [])


def find_reference(bundle: Bundle, beside: Path | None = None) -> Path | None:
    """The file of a bundle's reference, or the one in a folder beside it; None where there is none.

    Raises:
        BundleError: `beside` has none or several.
    """
    if beside is None:
        names = [name for name in bundle.manifest.files if name.startswith(f"{FOLDER}/") and name.endswith(".npz")]
        return bundle.file(names[0]) if names else None
    if beside.is_file():
        return beside
    if not beside.is_dir():
        raise BundleError(f"{beside} is neither a reference nor a folder that holds one. Give its path.")
    found = sorted(beside.glob("reference-*.npz"))
    if len(found) != 1:
        raise BundleError(f"{beside} holds {len(found)} references, one is expected. Name the file itself.")
    return found[0]


def read_reference(path: Path) -> Reference:
    """Reads a reference strictly.

    Raises:
        BundleError: no such file, a damaged one, or one of another schema.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        data = json.loads(bytes(arrays.pop(_FACTS)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BundleError(f"{path} is no readable reference ({error}). Make it again or copy it again.") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != REFERENCE_SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema {version}, this program reads {REFERENCE_SCHEMA_VERSION}. Make it again: "
            "dflash-export reference BUNDLE"
        )
    return Reference(decode(ReferenceFacts, data, str(path)), arrays)
