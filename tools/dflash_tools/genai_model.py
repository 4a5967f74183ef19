"""onnxruntime-genai on the same checkpoint: converted by its own builder, run by its own generator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.errors import DFlashError

INSTALL_HINT = "pip install onnxruntime-genai"


class GenaiModel:
    """A model of onnxruntime-genai on the CPU."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Opens a converted model.

        Args:
            folder: What `convert` wrote.
            threads: CPU threads.
        """
        import onnxruntime_genai as genai

        path = folder / "genai_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        path.write_text(json.dumps(config, indent=1), encoding="utf-8")
        self._genai: Any = genai
        self._model = genai.Model(str(folder))

    def timed_decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """Greedy tokens, as many as asked for unless a stop token comes.

        Returns:
            The tokens, and milliseconds a token over all but the first.
        """
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(ids) + count, min_length=len(ids) + count, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(ids))
        tokens: list[int] = []
        started = 0.0
        while len(tokens) < count and not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            if len(tokens) == 1:
                started = time.perf_counter()
        return tokens, 1000 * (time.perf_counter() - started) / max(1, len(tokens) - 1)


def convert(model: Path, out: Path, cache: Path, precision: str = "fp32") -> None:
    """Converts a checkpoint for the CPU with onnxruntime-genai's builder.

    Args:
        model: The checkpoint.
        out: Folder to make.
        cache: Folder for what the builder keeps.
        precision: `fp32`, or `int4`: groups of 32, head and embedding included, products rounding activations to int8.

    Raises:
        DFlashError: the package is not installed, or its builder failed.
    """
    argv = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out)]
    argv += ["-p", precision, "-e", "cpu", "-c", str(cache)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DFlashError(f"onnxruntime-genai's builder failed ({reason}). Is it installed? {INSTALL_HINT}")
