"""What the exporter built runs where nothing of the exporter is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Make
from pairs import HALF_PAIRS, MAIN, Pair

BLOCKED = (
    "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "huggingface_hub", "ml_dtypes",
    "dflash_export", "dflash_engines", "dflash_tools",
)  # fmt: skip
RUN = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import time
started = time.process_time()
from dflash_runtime import GenerationConfig, Session
seconds = time.process_time() - started
with Session.open(sys.argv[1], threads=1) as session:
    free = GenerationConfig(max_new_tokens=40, stop_token_ids=[])
    plain = session.generate("Hi 中🙂", GenerationConfig(max_new_tokens=40, plain=True, stop_token_ids=[]))
    result = session.generate("Hi 中🙂", free)
    stream = session.stream([{{"role": "user", "content": "Hi 中🙂"}}], free)
    pieces = list(stream)
assert result.token_ids == plain.token_ids == stream.result.token_ids and len(plain.token_ids) == 40
assert "".join(pieces) == result.text
assert result.num_drafts < 39 and not plain.num_drafts
assert not [name for name in {BLOCKED!r} if sys.modules.get(name)]
print(seconds)
"""


@pytest.mark.parametrize("pair", [MAIN, HALF_PAIRS[0]], ids=lambda pair: pair.name)
def test_a_moved_bundle_runs_without_torch(built: Make, pair: Pair, tmp_path: Path) -> None:
    moved = shutil.copytree(built(pair), tmp_path / "模型 dir" / "é x")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(moved)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_runtime_imports_quickly() -> None:
    code = "import time; t = time.process_time(); import dflash_runtime; print(time.process_time() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.5
