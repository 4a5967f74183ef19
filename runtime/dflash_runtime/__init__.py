# ruff: isort: skip_file
"""Runs a bundle, target and drafter, to tokens and text: never with torch. Start at `Session`."""

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import (
    BackendError, BundleError, CheckpointError, DFlashError, EngineError, NumericsError, OutputError, PairError,
    ParityError, PromptError, UnsupportedModelError,
)
from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_runtime.session import Session, TextPieces

__all__ = [
    "BackendError", "Bundle", "BundleError", "CheckpointError", "DFlashError", "EngineError", "GenerationConfig",
    "GenerationResult", "NumericsError", "OutputError", "PairError", "ParityError", "PromptError", "Session",
    "TextPieces", "UnsupportedModelError",
]
