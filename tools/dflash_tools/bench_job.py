"""What `bench` asks of a process that measures one engine, and what that process answers; both travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

from dflash_runtime.bundle import decode, write_atomically
from dflash_tools.position_acceptance import DraftedRound, drafted_rounds

OURS, TRANSFORMERS, AUTHORS, GENAI, SERVER = "ours", "transformers", "dflash", "genai", "openai"


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to decode."""

    block_size: int
    """1 is plain decoding."""
    scripted_tokens: int | None = None
    """Tokens every round is made to commit; None: what the drafter earns."""

    @property
    def name(self) -> str:
        """As it is shown: `plain`, `block 8`, `block 8 scripted 4`."""
        if self.block_size == 1:
            return "plain"
        return f"block {self.block_size}" + (f" scripted {self.scripted_tokens}" if self.scripted_tokens else "")


@dataclasses.dataclass(frozen=True)
class Question:
    """One request, the same for every engine."""

    ids: list[int]
    """The prompt's tokens."""
    messages: list[dict[str, Any]] | None
    """The conversation it was made from, for servers, which apply their own chat template; None for raw text."""
    max_new_tokens: int
    stop_token_ids: list[int]
    context_tokens: int | None = None
    """Set where the request measures time at that length of context and nothing else."""
    answer: list[int] | None = None
    """The target's own answer, where acceptance is scripted."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One engine, one process."""

    engine: str
    """`ours`, `transformers`, `dflash`, `genai` or `openai`."""
    bundle: str
    backend: str
    threads: int | None
    device: str
    """For PyTorch: `cpu` or `cuda`."""
    precision: str
    """For peers that choose theirs: fp32, fp16 or bf16."""
    model: str | None
    """Checkpoint folder or hub id of the target; for onnxruntime-genai its converted folder, for a server its URL."""
    drafter: str | None
    served_model: str | None
    template_args: dict[str, Any]
    modes: list[Mode]
    questions: list[Question]
    turn: int
    """Which round of the measurement: modes begin with another one in each."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request in one mode."""

    mode: Mode
    question: int
    """Its number."""
    token_ids: list[int]
    """New tokens, the stop token included; empty for a server, which tells text only."""
    time_to_first_token_ms: float
    round_ms: list[float]
    """Time from one arrival of tokens to the next."""
    round_tokens: list[int]
    """Tokens in each of those arrivals."""
    started_s: float
    """On the clock `time.monotonic`, which all processes share."""
    ended_s: float
    proposed_ids: list[list[int]] | None = None
    """What the drafter proposed, round by round, where the engine tells."""
    prefill_ms: float | None = None
    prefill_context_ms: float | None = None
    stages_ms: list[dict[str, float]] | None = None
    """The stages of each cycle."""
    text: str | None = None
    context_tokens: int | None = None
    """Of the question."""

    def rounds(self) -> list[DraftedRound]:
        """Rounds of draft and verify, where the engine tells its proposals."""
        return drafted_rounds(self.token_ids, self.round_tokens, self.proposed_ids) if self.proposed_ids else []


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """What one process measured."""

    answers: list[Answer]
    precision: str
    """What was executed; `as served` where a server does not say."""
    versions: dict[str, str]
    peak_resident_bytes: int
    device_memory_bytes: int | None
    """Memory of the process on the GPU at its end, where nvidia-smi tells."""


def write_json(path: Path, value: Job | EngineRun) -> None:
    """Writes a job or its result."""
    write_atomically(path, json.dumps(dataclasses.asdict(value)))


def read_job(path: Path) -> Job:
    """Reads what `write_json` wrote; BundleError names what does not fit."""
    return cast(Job, decode(Job, json.loads(path.read_text(encoding="utf-8")), "the job"))


def read_run(path: Path) -> EngineRun:
    """Reads what `write_json` wrote; BundleError names what does not fit."""
    return cast(EngineRun, decode(EngineRun, json.loads(path.read_text(encoding="utf-8")), "the result"))
