"""A reference from a bundle's own portable graphs, where PyTorch made none: it proves the lowering alone."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import onnxruntime as ort

from dflash_export.drafter_kinds import PLAIN_ARCHITECTURE
from dflash_runtime.bundle import Bundle, DrafterFacts
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.debug_graphs import PORTABLE, open_debug_probe
from dflash_tools.reference_file import Reference
from dflash_tools.reference_making import Order, Progress, Prompt, make_reference
from dflash_tools.reference_record import INT8_PRODUCTS, PairFacts, quantization_of
from dflash_tools.validate_facts import ids_of, rendered_by
from dflash_tools.validation_prompts import VALIDATION_PROMPTS, fitting, random_prompts

NEW_TOKENS = 24


def portable_reference(bundle: Bundle, progress: Progress) -> Reference:
    """Runs the portable graphs in fp32, and rounding: as half-precision graphs say, or as int8 kernels do.

    Args:
        bundle: Whose.
        progress: Called with stage, done, total.
    """
    manifest = bundle.manifest
    new_tokens = min(NEW_TOKENS, max(2, manifest.max_context_tokens // 2))
    prompts = _prompts(bundle, new_tokens)
    rows = max(len(prompt.ids) for prompt in prompts) + new_tokens + 2 * max(manifest.block_sizes)
    drafter = manifest.drafter
    pair = PairFacts(
        stop_token_ids=list(manifest.text.stop_token_ids),
        template_args=manifest.text.template_args,
        target_windows=[],
        has_drafter=drafter is not None,
        mask_token_id=None if drafter is None else drafter.mask_token_id,
        tap_layer_ids=manifest.taps.layer_ids,
        drafter_windows=[] if drafter is None else [t.window_tokens for t in drafter.graph.state[0::2]],
        trained_block_size=None if drafter is None else drafter.block_size,
        proposes_likeliest=drafter is None or _proposes_likeliest(drafter, manifest.target.vocab_size),
    )
    versions = {"dflash-export": importlib.metadata.version("dflash-export"), "onnxruntime": ort.__version__}
    order = Order(
        "the portable graphs", manifest.precision, manifest.target.source.config_sha256,
        None if manifest.drafter is None else manifest.drafter.source.config_sha256, pair,
        manifest.target.vocab_size, manifest.block_sizes, manifest.max_context_tokens, new_tokens, versions,
        quantization_of(manifest),
    )  # fmt: skip
    oracle = open_debug_probe(bundle, PORTABLE, rows, exact=True)
    twins = {}
    if manifest.precision != "fp32":
        twins[manifest.precision] = open_debug_probe(bundle, PORTABLE, rows)
    if manifest.quantized:
        twins[INT8_PRODUCTS] = open_debug_probe(bundle, PORTABLE, rows, exact=True, int8_products=True)
    return make_reference(order, prompts, oracle, twins, progress, {"outputs": 1 << 30, "inner": 1 << 30})


def _proposes_likeliest(drafter: DrafterFacts, vocab_size: int) -> bool:
    width = next(output.shape[-1] for output in drafter.graph.outputs if output.name == "draft_logits")
    return width == vocab_size and drafter.architecture == PLAIN_ARCHITECTURE


def _prompts(bundle: Bundle, new_tokens: int) -> list[Prompt]:
    tokenizer, manifest = Tokenizer.open(bundle), bundle.manifest
    given: list[tuple[Any, list[int]]] = [(None, ids) for ids in random_prompts(manifest.target.vocab_size)]
    if tokenizer is not None:
        given = [(text, ids_of(tokenizer, text)) for text in VALIDATION_PROMPTS]
    found = []
    for prompt, ids in given:
        kept = fitting(ids, manifest.max_context_tokens, new_tokens)
        rendered = "" if tokenizer is None else rendered_by(tokenizer, prompt)
        found.append(Prompt(prompt, kept, rendered) if kept == ids else Prompt(None, kept))
    return found
