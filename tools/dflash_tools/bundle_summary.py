"""What a bundle is, told to a person: the text of `inspect` and the end of `build`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dflash_runtime.bundle import Bundle, CheckRow, Manifest, SourceFacts
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, open_engine
from dflash_runtime.errors import EngineError
from dflash_runtime.generation import GenerationConfig
from dflash_tools.range_lines import range_lines
from dflash_tools.ring_lines import ring_lines
from dflash_tools.sizes import bytes_text, count_text

LABEL_WIDTH = 12


def total_bytes(bundle: Bundle) -> int:
    """Bytes of every file the manifest lists, and of the engines beside them."""
    listed = sum(facts.size_bytes for facts in bundle.manifest.files.values())
    return listed + sum(path.stat().st_size for path in (bundle.path / "engines").rglob("*") if path.is_file())


def engine_names(bundle: Bundle) -> list[str]:
    """Backends the bundle has engines for."""
    return sorted(path.parent.name for path in (bundle.path / "engines").glob(f"*/{ENGINE_RECORD_NAME}"))


def summary_lines(bundle: Bundle) -> Iterator[str]:
    """The bundle in about fifteen lines."""
    manifest = bundle.manifest
    yield _line("bundle", f"{bundle.path} ({bytes_text(total_bytes(bundle))})")
    target = manifest.target
    head = "tied head" if target.head_weight == target.embedding_weight else "separate head"
    yield _line("target", f"{target.name}, {target.architecture}, {count_text(target.num_parameters)} parameters")
    yield _line("", f"{target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}, {head}")
    yield _line("", _source(target.source))
    yield from _drafter_lines(manifest)
    origin = "as the drafter asks" if manifest.taps.origin == "drafter" else "the default choice"
    yield _line("taps", f"layers {_numbers(manifest.taps.layer_ids)} ({origin})")
    yield from _precision_lines(manifest)
    for number, text in enumerate(range_lines(bundle)):
        yield _line("" if number else "fp16 range", text)
    yield _line("context", f"{manifest.max_context_tokens} tokens, {_kv_text(manifest)}")
    yield _line("text", _text_facts(manifest))
    yield _line("engines", ", ".join(engine_names(bundle)) or f"none; make one: dflash-export engines {bundle.path}")
    for text in _ring_lines(bundle):
        yield _line("", text)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.provenance.versions.items())
    yield _line("made with", f"dflash-export {manifest.provenance.tool_version}, {versions}")


def _ring_lines(bundle: Bundle) -> list[str]:
    """Of the CPU's engine, where there is one for the bundle's graphs."""
    if "ort-cpu" not in engine_names(bundle):
        return []
    try:
        return list(ring_lines(open_engine(bundle, "ort-cpu")))
    except EngineError as error:
        return [f"that of ort-cpu is not usable: {error}"]


def _precision_lines(manifest: Manifest) -> Iterator[str]:
    if not manifest.quantized:
        yield _line("precision", manifest.precision)
        return
    sizes = quantized_bytes(manifest)
    kept = sum(entry.length_bytes for entry in manifest.weights.values()) - sum(size for _, size in sizes.values())
    texts = [f"{words}, {count} matrices in {bytes_text(size)}" for words, (count, size) in sizes.items()]
    yield _line("precision", texts[0])
    for text in texts[1:]:
        yield _line("", text)
    yield _line("", f"{manifest.precision} for the rest, {bytes_text(kept)}")


def quantized_bytes(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Scheme in words -> how many matrices are held so, and their bytes with scales and zero points."""
    found: dict[str, tuple[int, int]] = {}
    for name, facts in manifest.quantized.items():
        grouped = "per channel" if facts.group_size is None else f"group {facts.group_size}"
        signs = "symmetric" if facts.zero_points is None else "asymmetric"
        floating = manifest.weights[name].dtype == "F8_E4M3"
        scheme = f"fp{facts.bits} {grouped}" if floating else f"int{facts.bits} {grouped} {signs}"
        words = f"{scheme} ({facts.origin})"
        parts = [name, facts.scales] + ([] if facts.zero_points is None else [facts.zero_points])
        count, size = found.get(words, (0, 0))
        found[words] = count + 1, size + sum(manifest.weights[part].length_bytes for part in parts)
    return found


def _drafter_lines(manifest: Manifest) -> Iterator[str]:
    drafter = manifest.drafter
    if drafter is None:
        yield _line("drafter", "none: runs plain; add one with: dflash-export add-drafter BUNDLE DRAFTER")
        return
    yield _line("drafter", f"{drafter.name}, {drafter.architecture}, {count_text(drafter.num_parameters)} parameters")
    yield _line("", f"{drafter.num_layers} layers, mask id {drafter.mask_token_id}")
    yield _line("", _source(drafter.source))
    default = GenerationConfig().fixed_block_size(manifest)
    yield _line("block sizes", f"{_numbers(manifest.block_sizes)}; {default} unless asked otherwise")


def _source(source: SourceFacts) -> str:
    revision = f" at {source.revision}" if source.revision else ""
    return f"from {source.kind} {source.id}{revision}"


def _text_facts(manifest: Manifest) -> str:
    text = manifest.text
    template = "chat template" if text.has_chat_template else "no chat template"
    arguments = "".join(f", {name}={value}" for name, value in text.template_args.items())
    return f"{template}{arguments}; stop ids {_numbers(text.stop_token_ids)}"


def _kv_text(manifest: Manifest) -> str:
    """Size of the KV caches at full context, in the bundle's precision."""
    width = 4 if manifest.precision == "fp32" else 2
    graphs = [manifest.target.graph]
    if manifest.drafter is not None:
        graphs.append(manifest.drafter.context_graph)
    rows = sum(_row_elements(state.shape) for graph in graphs for state in graph.state)
    return f"KV cache {bytes_text(rows * width)} a token, {bytes_text(rows * width * manifest.max_context_tokens)} full"


def _row_elements(shape: list[int | str]) -> int:
    """Elements of one token's row of a state tensor: the fixed sizes, with B as 1."""
    return math.prod(size for size in shape if isinstance(size, int))


def check_table(checks: list[CheckRow]) -> Iterator[str]:
    """The parity table, one line a row; a `"` stands for the words above it."""
    if not checks:
        yield "No check is recorded in this bundle."
        return
    rows = [("stage", "tensor", "worst", "tolerance", "", "covered")]
    said = ""
    for check in checks:
        covered = '"' if check.covered == said else check.covered
        said = check.covered
        verdict = "ok" if check.passed else "FAILED"
        rows.append((check.stage, check.tensor, f"{check.worst:.3g}", f"{check.tolerance:.3g}", verdict, covered))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()


def _numbers(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"
