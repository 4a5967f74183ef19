"""Which block size `run` takes when none is given: what the controller chooses, or what `tune` measured.

Where several sizes are built the controller chooses round by round, beginning with what `tune` measured in this very
state of the machine. Where one is built, that measurement decides between it and plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_runtime.adaptive import BlockSizeController
from dflash_runtime.bundle import Bundle
from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_runtime.session import Session
from dflash_tools.block_choice import chances_by_position, choose_block_size, round_ms_at
from dflash_tools.device_conditions import read_conditions
from dflash_tools.engine_place import find_engine_place
from dflash_tools.machine_probe import Machine
from dflash_tools.sizes import counted
from dflash_tools.speed_profile import FILE_NAME, SpeedProfile, condition_mismatches, read_profiles


@dataclasses.dataclass(frozen=True)
class PickedBlockSize:
    """What was picked, and why."""

    config: GenerationConfig
    """The request with the block size set, `auto` or plain; unchanged where nothing is to be picked."""
    reason: str | None
    """None where there is no profile at all, and nothing to say."""
    profile: SpeedProfile | None
    """The one that holds here."""


def pick_block_size(
    bundle: Bundle, config: GenerationConfig, backend: str, threads: int | None, prompt_tokens: int,
    machine: Machine | None = None,
) -> PickedBlockSize:
    """Picks for the length of context half way through the answer.

    Args:
        bundle: The pair.
        config: The request; one that names block size, schedule or plain decoding stays as it is.
        backend: What executes it.
        threads: As given to the session.
        prompt_tokens: Length of the prompt.
        machine: Where power mode and clocks are read.

    Raises:
        EngineError: a profile that cannot be read.
    """  # fmt: skip
    fixed = config.block_size not in (None, "auto") or config.block_schedule is not None or config.plain
    if fixed or bundle.manifest.drafter is None:
        return PickedBlockSize(config, None, None)
    several = len(bundle.manifest.block_sizes) > 1
    adaptive = config.block_size == "auto" or (several and not text_depends_on_blocks(config))
    config = dataclasses.replace(config, block_size="auto") if adaptive else config
    profile, words = _find_profile(bundle, backend, threads, machine or Machine())
    if profile is None:
        return PickedBlockSize(config, words, None)
    choice = choose_block_size(profile, prompt_tokens + config.max_new_tokens // 2)
    plain, name = choice.block_size == 1, _name(choice.block_size)
    why = f"by the speed profile of {profile.made}: {choice.reason}."
    if adaptive:
        return PickedBlockSize(config, f"Block sizes are chosen round by round, beginning with {name} {why}", profile)
    picked = dataclasses.replace(config, block_size=None if plain else choice.block_size, plain=plain)
    return PickedBlockSize(picked, f"{name.capitalize()} {why}", profile)


def text_depends_on_blocks(config: GenerationConfig) -> bool:
    """Whether a seed's text is another one with other block sizes, so that it should not hang on time."""
    return config.temperature > 0 and config.proposals == "sampled" and config.seed is not None


def set_block_size(
    session: Session, config: GenerationConfig, backend: str, threads: int | None, prompt_tokens: int
) -> PickedBlockSize:
    """Picks for a session; where block sizes are chosen round by round, it begins with the profile that holds here.

    Arguments and errors are those of `pick_block_size`.
    """
    picked = pick_block_size(session.bundle, config, backend, threads, prompt_tokens)
    if picked.config.block_size == "auto" and picked.profile is not None:
        half_way = prompt_tokens + config.max_new_tokens // 2
        session.controller = controller_from(picked.profile, session.bundle.manifest.block_sizes, half_way)
    return picked


def controller_from(profile: SpeedProfile, block_sizes: Sequence[int], context_tokens: int) -> BlockSizeController:
    """A controller that begins with what was measured, at a length of context."""
    return BlockSizeController(block_sizes, round_ms_at(profile, context_tokens), chances_by_position(profile))


def chosen_words(controller: BlockSizeController, result: GenerationResult) -> str:
    """What a controller chose in a request, and by which figures."""
    if not result.rounds_by_block_size:
        return "Block sizes are chosen round by round; this answer had no round behind its first token."
    rounds = ", ".join(f"{counted(n, 'round')} of {_name(size)}" for size, n in result.rounds_by_block_size.items())
    rates = [
        f"{_name(size)} {tokens:.2f} tokens in {ms:.1f} ms"
        for size in controller.block_sizes
        for tokens, ms in [(controller.expected_tokens(size)[0], controller.expected_ms(size))]
    ]
    return f"Block sizes chosen by tokens per millisecond: {rounds}. Expected now: {', '.join(rates)}."


def _name(size: int) -> str:
    return "plain decoding" if size == 1 else f"block size {size}"


def _find_profile(
    bundle: Bundle, backend: str, threads: int | None, machine: Machine
) -> tuple[SpeedProfile | None, str | None]:
    """The newest profile that holds here, or why there is none of those that are there."""
    place = find_engine_place(bundle, backend, machine)
    profiles = read_profiles(place.folder)
    if not profiles:
        return None, None
    conditions = read_conditions(machine, uses_gpu=backend != "ort-cpu")
    reasons = []
    for profile in reversed(profiles):  # the newest is the last
        words = condition_mismatches(profile, backend, threads, place.record_sha256, conditions)
        if not words:
            return profile, None
        reasons.append("; ".join(words))
    remedy = f"Run: dflash-export tune {bundle.path} --backend {backend}"
    remedy += "" if threads is None else f" --threads {threads}"
    return None, f"The speed profile in {place.folder / FILE_NAME} is not used: {reasons[0]}. {remedy}"
