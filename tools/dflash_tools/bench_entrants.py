"""Who takes part in a measurement: this program, and the peers `--against` names."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime.bundle import Bundle, SourceFacts, sha256_of
from dflash_runtime.errors import CheckpointError, DFlashError, PairError
from dflash_tools.authors_loop import PACKAGE
from dflash_tools.bench_job import AUTHORS, GENAI, OURS, SERVER, TRANSFORMERS, Mode
from dflash_tools.bench_rounds import Entrant
from dflash_tools.error_lines import needs_extra
from dflash_tools.genai_model import INSTALL_HINT, convert

OUR_LABEL = "dflash-export"
LABELS = {TRANSFORMERS: "Transformers generate", AUTHORS: "dflash (authors)", GENAI: "onnxruntime-genai"}
_MODULES = {
    TRANSFORMERS: ("transformers", "pip install 'dflash-export[export]'"),
    AUTHORS: ("dflash", f"pip install {PACKAGE}"),
    GENAI: ("onnxruntime_genai", INSTALL_HINT),
}


def our_modes(bundle: Bundle, block_sizes: Sequence[int], scripted: Sequence[int]) -> list[Mode]:
    """Plain decoding, every block size, and every scripted acceptance at the largest of them.

    Args:
        bundle: The pair.
        block_sizes: Those asked for; empty for all the bundle has engines for.
        scripted: Tokens a round commits by script.

    Raises:
        PairError: block sizes for a bundle without a drafter, or one that is too large.
        DFlashError: a script the largest block size has no room for.
    """
    manifest = bundle.manifest
    if manifest.drafter is None:
        if block_sizes or scripted:
            raise PairError(f"{bundle.path} has no drafter, so only plain decoding can be measured.")
        return [Mode(1)]
    known = {*manifest.block_sizes, min(manifest.drafter.block_size, max(manifest.block_sizes))}
    sizes = sorted(set(block_sizes or (size for size in known if size > 1)))
    if sizes[-1] > max(manifest.block_sizes):
        raise PairError(f"Block size {sizes[-1]} is larger than the bundle allows, {max(manifest.block_sizes)}.")
    if scripted and max(scripted) > sizes[-1]:
        raise DFlashError(f"A round of block size {sizes[-1]} commits at most {sizes[-1]} tokens, not {max(scripted)}.")
    modes = [Mode(1), *(Mode(size) for size in sizes)]
    return modes + [Mode(sizes[-1], tokens) for tokens in sorted(set(scripted))]


def find_entrants(
    bundle: Bundle, modes: list[Mode], against: Sequence[str], model: str | None, drafter: str | None
) -> list[Entrant]:
    """This program first, then the peers in the order they are named.

    Raises:
        DFlashError: a peer is unknown, not installed, or lacks a checkpoint.
    """
    entrants = [Entrant(OURS, OUR_LABEL, None, None, modes)]
    for name in dict.fromkeys(against):
        if name.startswith(f"{SERVER}:"):
            url, _, served = name.removeprefix(f"{SERVER}:").partition("#")
            label = f"{served} at {url}" if served else url
            entrants.append(Entrant(SERVER, label, url, None, [Mode(1)], served or None))
            continue
        if name not in _MODULES:
            raise DFlashError(f"--against {name!r} is none of {', '.join(_MODULES)}, {SERVER}:URL.")
        module, remedy = _MODULES[name]
        if importlib.util.find_spec(module) is None:
            raise DFlashError(f"--against {name} needs the package {module}, which is not installed: {remedy}")
        target = _checkpoint(bundle.manifest.target.source, model, "target")
        if name == AUTHORS:
            facts = bundle.manifest.drafter
            if facts is None:
                raise PairError(f"{bundle.path} has no drafter to give to the authors' package.")
            own = _checkpoint(facts.source, drafter, "drafter")
            entrants.append(Entrant(name, LABELS[name], target, own, modes))
        else:
            entrants.append(Entrant(name, LABELS[name], target, None, [Mode(1)]))
    return entrants


def convert_for_genai(entrants: Sequence[Entrant], folder: Path | None, scratch: Path) -> list[Entrant]:
    """Gives onnxruntime-genai its own kind of model: `folder`, or one its builder makes now."""
    ready = []
    for entrant in entrants:
        if entrant.engine != GENAI:
            ready.append(entrant)
            continue
        if folder is None:
            convert(Path(str(entrant.model)), scratch / "genai", scratch / "genai-cache")
        model = str(folder or scratch / "genai")
        ready.append(Entrant(entrant.engine, entrant.label, model, None, entrant.modes))
    return ready


def _checkpoint(source: SourceFacts, given: str | None, role: str) -> str:
    """Folder of the checkpoint the bundle was built from; the config's hash says whether it is that one."""
    reference = given or (source.id if source.revision is None else f"{source.id}@{source.revision}")
    with needs_extra("export"):
        from dflash_export.checkpoint import find_checkpoint
    option = {"target": "--model", "drafter": "--drafter"}[role]
    try:
        folder = find_checkpoint(reference, role=role).folder
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give the checkpoint the bundle was built from with {option}.") from error
    digest = sha256_of(folder / "config.json")
    if digest != source.config_sha256:
        raise CheckpointError(
            f"{folder / 'config.json'} has sha256 {digest[:12]}, the bundle's {role} was built from "
            f"{source.config_sha256[:12]}. Give the checkpoint the bundle was built from with {option}."
        )
    return str(folder)
