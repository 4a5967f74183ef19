"""Which block size `run` takes when none is given: that of the speed profile `tune` measured in this very state."""

from __future__ import annotations

import dataclasses

from dflash_runtime.bundle import Bundle
from dflash_runtime.generation import GenerationConfig
from dflash_tools.block_choice import choose_block_size
from dflash_tools.device_conditions import read_conditions
from dflash_tools.engine_place import find_engine_place
from dflash_tools.machine_probe import Machine
from dflash_tools.speed_profile import FILE_NAME, condition_mismatches, read_profiles


@dataclasses.dataclass(frozen=True)
class PickedBlockSize:
    """What was picked, and why."""

    config: GenerationConfig
    """The request with the block size set, or plain; unchanged where no profile holds here."""
    reason: str | None
    """None where there is no profile at all, and nothing to say."""
    from_profile: bool


def pick_block_size(
    bundle: Bundle, config: GenerationConfig, backend: str, threads: int | None, prompt_tokens: int,
    machine: Machine | None = None,
) -> PickedBlockSize:
    """Picks by the profile, for the length of context half way through the answer.

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
    said = config.block_size is not None or config.block_schedule is not None or config.plain
    if said or bundle.manifest.drafter is None:
        return PickedBlockSize(config, None, False)
    machine = machine or Machine()
    place = find_engine_place(bundle, backend, machine)
    profiles = read_profiles(place.folder)
    if not profiles:
        return PickedBlockSize(config, None, False)
    conditions = read_conditions(machine, uses_gpu=backend != "ort-cpu")
    reasons = []
    for profile in reversed(profiles):  # the newest is the last
        words = condition_mismatches(profile, backend, threads, place.record_sha256, conditions)
        if not words:
            choice = choose_block_size(profile, prompt_tokens + config.max_new_tokens // 2)
            plain = choice.block_size == 1
            picked = dataclasses.replace(config, block_size=None if plain else choice.block_size, plain=plain)
            name = "Plain decoding" if plain else f"Block size {choice.block_size}"
            return PickedBlockSize(picked, f"{name} by the speed profile of {profile.made}: {choice.reason}.", True)
        reasons.append("; ".join(words))
    words_of_newest = reasons[0]
    remedy = f"Run: dflash-export tune {bundle.path} --backend {backend}"
    remedy += "" if threads is None else f" --threads {threads}"
    return PickedBlockSize(
        config, f"The speed profile in {place.folder / FILE_NAME} is not used: {words_of_newest}. {remedy}", False
    )
