"""A reference from the pair's checkpoints, by PyTorch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer, PreTrainedConfig

from dflash_export.add_drafter import plan_addition
from dflash_export.catalog import drafter_template_args
from dflash_export.checkpoint import Checkpoint, find_checkpoint, read_target_config, with_imported_weights
from dflash_export.drafter_build import DrafterPlan
from dflash_export.reference_run import quiet_transformers
from dflash_export.text_files import read_text_facts
from dflash_runtime.bundle import Bundle, Manifest, SourceFacts
from dflash_runtime.errors import CheckpointError, PairError, PromptError
from dflash_tools.reference_file import Reference
from dflash_tools.reference_making import Order, Progress, Prompt, make_reference
from dflash_tools.reference_record import INT8_PRODUCTS, PairFacts, quantization_of
from dflash_tools.torch_loading import PairSource
from dflash_tools.validate_facts import messages_of
from dflash_tools.validation_prompts import VALIDATION_PROMPTS, fitting, random_prompts

NEW_TOKENS = 24
_HALVES = ("fp16", "bf16")


def build_reference(
    bundle: Bundle, target: str | None, drafter: str | None, progress: Progress, *,
    prompts: Sequence[Any] = (), precisions: Sequence[str] = (), new_tokens: int = NEW_TOKENS,
    budgets: dict[str, int] | None = None,
) -> Reference:
    """Runs the checkpoints a bundle was made from.

    Args:
        bundle: For which pair, precision and context.
        target: Where its checkpoint is; None for where the bundle came from.
        drafter: The same for the drafter's.
        progress: Called with stage, done, total.
        prompts: Texts or messages; empty for the usual ones.
        precisions: Half precisions to measure PyTorch's own deviation in, besides the bundle's.
        new_tokens: Greedy tokens after each prompt.
        budgets: Bytes above which rows are sketched, by kind of tensor.

    Raises:
        PromptError: a prompt that the checkpoint cannot turn into ids.
        CheckpointError: a checkpoint is not where the bundle came from, or does not fit into memory.
        PairError: it is another checkpoint than the bundle's.
    """
    manifest = bundle.manifest
    checkpoint = find_checkpoint(target or _spelled(manifest.target.source), role="target")
    _require_same(checkpoint, manifest.target.source)
    _require_memory(manifest)
    config = read_target_config(checkpoint, quantized=bool(manifest.quantized))
    plan = None
    if manifest.drafter is not None:
        plan = plan_addition(bundle, drafter or _spelled(manifest.drafter.source))
    pair = _pair_facts(manifest, checkpoint, config, plan)
    order = Order(
        f"PyTorch {importlib.metadata.version('torch')}", manifest.precision, manifest.target.source.config_sha256,
        None if manifest.drafter is None else manifest.drafter.source.config_sha256,
        pair, manifest.target.vocab_size, manifest.block_sizes, manifest.max_context_tokens,
        min(new_tokens, max(2, manifest.max_context_tokens // 2)), _versions(), quantization_of(manifest),
    )  # fmt: skip
    encoded = _encode(checkpoint, manifest, pair, prompts, order)
    rounded = sorted({*precisions, *([manifest.precision] if manifest.precision in _HALVES else [])})
    rounded += [INT8_PRODUCTS] if manifest.quantized else []
    source = PairSource(manifest, with_imported_weights(checkpoint), plan, pair.tap_layer_ids)
    progress("load in PyTorch", 0, 1 + len(rounded))
    oracle = source.load("fp32")
    twins = {precision: source.load(precision) for precision in rounded}
    progress("load in PyTorch", 1 + len(rounded), 1 + len(rounded))
    return make_reference(order, encoded, oracle, twins, progress, budgets)


def _spelled(source: SourceFacts) -> str:
    """A source as `find_checkpoint` takes it."""
    return f"{source.id}@{source.revision}" if source.kind == "hub" and source.revision else source.id


def _require_same(checkpoint: Checkpoint, source: SourceFacts) -> None:
    found = checkpoint.source.config_sha256
    if found != source.config_sha256:
        raise PairError(
            f"{checkpoint.folder} has a config.json of sha256 {found[:12]}, the bundle was made from one of "
            f"{source.config_sha256[:12]}. Give the checkpoint the bundle was made from."
        )


def _require_memory(manifest: Manifest) -> None:
    needed = manifest.target.num_parameters * 4
    free: int = psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"{manifest.target.name} takes {needed / 1e9:.1f} GB in fp32 and {free / 1e9:.1f} GB of memory are free. "
            "Make the reference on a larger machine; the bundle then carries it."
        )


def _pair_facts(
    manifest: Manifest, checkpoint: Checkpoint, config: PreTrainedConfig, plan: DrafterPlan | None
) -> PairFacts:
    known = {} if plan is None else drafter_template_args(plan.checkpoint.source.id)
    arguments = {**manifest.text.template_args, **known}
    text, _ = read_text_facts(checkpoint.folder, arguments)
    return PairFacts(
        stop_token_ids=text.stop_token_ids,
        template_args=arguments,
        target_windows=_windows(config.get_text_config(decoder=True)),
        has_drafter=plan is not None,
        mask_token_id=None if plan is None else plan.config.mask_token_id,
        tap_layer_ids=list(manifest.taps.layer_ids if plan is None else plan.config.target_layer_ids),
        drafter_windows=[] if plan is None else plan.config.windows,
        trained_block_size=None if plan is None else plan.config.block_size,
        proposes_likeliest=plan is None or (plan.config.dflash2 is None and plan.config.draft_vocab_size is None),
    )


def _windows(text: Any) -> list[int | None]:
    """Per layer as the config states them; empty where it does not go layer by layer."""
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if not kinds or set(kinds) - {"full_attention", "sliding_attention"}:
        return []
    return [int(window) if kind == "sliding_attention" and window else None for kind in kinds]


def _encode(
    checkpoint: Checkpoint, manifest: Manifest, pair: PairFacts, prompts: Sequence[Any], order: Order
) -> list[Prompt]:
    """Ids by the checkpoint's own tokenizer and template, through Transformers."""
    room = (manifest.max_context_tokens, order.new_tokens)
    if not _has_tokenizer(checkpoint.folder):
        if prompts:
            raise PromptError(f"{checkpoint.folder} has no tokenizer, so prompts cannot become ids. Leave them out.")
        return [Prompt(None, fitting(ids, *room)) for ids in random_prompts(manifest.target.vocab_size)]
    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True)
    found = []
    for given in prompts or VALIDATION_PROMPTS:
        if not manifest.text.has_chat_template:
            if not isinstance(given, str):
                raise PromptError(f"{checkpoint.folder} has no chat template for messages. Give texts as prompts.")
            ids, rendered = tokenizer(given).input_ids, given
        else:
            how = {"conversation": messages_of(given), "add_generation_prompt": True, **pair.template_args}
            ids = tokenizer.apply_chat_template(tokenize=True, return_dict=False, **how)
            rendered = tokenizer.apply_chat_template(tokenize=False, **how)
        whole = [int(token) for token in ids]
        kept = fitting(whole, *room)
        found.append(Prompt(given, kept, rendered) if kept == whole else Prompt(None, kept))
    return found


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"))


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("dflash-export", "numpy", "torch", "transformers")}
