"""Training data in its stages: prompts, their size, answers, taps."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_export.build_plan import TargetPlan
from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.text_files import read_text_facts
from dflash_runtime.errors import CheckpointError, OutputError, PromptError
from dflash_tools.answer_batch import AnswerRules
from dflash_tools.answer_linear import can_pack, pack_linear_layers
from dflash_tools.answer_writing import Prompt, answering_order, check_lengths, claim_folder, write_answers
from dflash_tools.prompt_file import Messages, prompts_sha256, read_prompts
from dflash_tools.sizes import bytes_text
from dflash_tools.training_answers import read_answers
from dflash_tools.training_processes import default_device
from dflash_tools.training_taps import ITEM_BYTES, TapFileFacts, cache_bytes, cache_taps
from dflash_tools.training_target import FrozenTarget, find_target, target_digest

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What the user asked for."""

    target: str
    prompt_file: Path
    out: Path
    field: str = "prompt"
    raw: bool = False
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 16
    max_length: int = 3072
    no_taps: bool = False


def make_data(options: DataOptions, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Makes, or goes on making, a folder of answers and taps.

    Args:
        options: What to make.
        progress: Called with stage, done, total.
        say: Called with what the user should know before the work.

    Returns:
        Counts and sizes.

    Raises:
        DFlashError: anything the user can mend, before the long work.
    """
    plan = find_target(options.target)
    text = plan.config.get_text_config()
    stops = read_text_facts(plan.checkpoint.folder, options.template_args)[0].stop_token_ids
    written = read_prompts(options.prompt_file, options.field)
    prompts = answering_order(encoded_prompts(options, plan, written))
    check_lengths(prompts, options.max_new_tokens, getattr(text, "max_position_embeddings", None))
    layer_ids = default_target_layer_ids(int(text.num_hidden_layers))
    row_values = len(layer_ids) * int(text.hidden_size)
    if not options.no_taps:
        _require_room(options, prompts, row_values, say)
    digest = target_digest(plan)
    done = claim_folder(options.out, _facts(options, digest, prompts_sha256(written), len(prompts), stops))
    target = _answering_target(plan, options.batch_size)
    rules = AnswerRules(options.max_new_tokens, frozenset(stops), options.temperature)
    started = time.monotonic()
    write_answers(
        options.out, prompts, done, target.model, rules,
        batch_size=options.batch_size, seed=options.seed, progress=progress,
    )  # fmt: skip
    seconds = time.monotonic() - started
    answers = read_answers(
        options.out, vocab_size=int(text.vocab_size), max_text_tokens=options.max_length, num_held_out=0
    )
    if not options.no_taps:
        target.model.set_attn_implementation("sdpa")
        facts = TapFileFacts(answers.sha256, digest, tuple(layer_ids), row_values)
        cache_taps(options.out, answers, facts, lambda ids: target.taps(ids, layer_ids), progress)
    size = None if options.no_taps else cache_bytes(answers, row_values)
    tokens = answers.num_answer_tokens(range(len(answers.texts)))
    return {
        "out": str(options.out), "num_answers": len(answers.texts), "num_left_out": answers.num_left_out,
        "num_answer_tokens": tokens, "num_resumed": done, "answer_seconds": seconds, "tap_bytes": size,
        "stop_token_ids": list(stops),
    }  # fmt: skip


def _answering_target(plan: TargetPlan, batch_size: int) -> FrozenTarget:
    target = FrozenTarget.load(plan, default_device())
    if can_pack(target.model):
        pack_linear_layers(target.model, batch_size)
    return target


def encoded_prompts(options: DataOptions, plan: TargetPlan, written: list[str | Messages]) -> list[Prompt]:
    """Prompts as token ids, through the chat template unless told otherwise.

    Raises:
        CheckpointError: the target has no tokenizer.
        PromptError: it has no chat template, or the prompt is not what the options say.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(plan.checkpoint.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{plan.checkpoint.folder} has no usable tokenizer ({error}).") from error
    if not options.raw and not tokenizer.chat_template:
        raise PromptError(f"{plan.checkpoint.name} has no chat template. Give --raw to use the prompts as they are.")
    prompts = []
    for number, prompt in enumerate(written):
        if options.raw:
            if not isinstance(prompt, str):
                raise PromptError(f"prompt {number + 1} is a list of messages and --raw takes text only.")
            ids = tokenizer(prompt).input_ids
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            shown = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options.template_args
            )
            ids = tokenizer(shown, add_special_tokens=False).input_ids
        prompts.append(Prompt(number, [int(i) for i in ids]))
    return prompts


def _require_room(options: DataOptions, prompts: list[Prompt], row_values: int, say: Callable[[str], None]) -> None:
    """Says how large the cache of taps can become, and refuses what the disk cannot hold."""
    longest = sum(min(options.max_length, len(p.ids) + options.max_new_tokens) - 1 for p in prompts)
    needed = longest * row_values * ITEM_BYTES
    say(f"{len(prompts)} prompts; taps take at most {bytes_text(needed)} on disk")
    parent = options.out.absolute()
    while not parent.exists():
        parent = parent.parent
    there = sum(p.stat().st_size for p in options.out.glob("*")) if options.out.is_dir() else 0
    free = shutil.disk_usage(parent).free + there
    if needed > free:
        raise OutputError(
            f"the taps of {len(prompts)} prompts and answers can take {bytes_text(needed)} and {parent} has "
            f"{bytes_text(free)} free. Make room, lower --max-new-tokens, or give --no-taps."
        )


def _facts(
    options: DataOptions, digest: str, prompts_hash: str, num_prompts: int, stops: list[int]
) -> dict[str, Any]:
    return {
        "target": options.target, "target_sha256": digest, "prompts_sha256": prompts_hash, "num_prompts": num_prompts,
        "raw": options.raw, "template_args": options.template_args, "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature, "seed": options.seed, "batch_size": options.batch_size,
        "stop_token_ids": list(stops),
    }  # fmt: skip
