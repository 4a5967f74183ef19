"""tools -> {export, engines} -> runtime, and heavy packages only behind the door they belong to."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "dflash_runtime": ROOT / "runtime",
    "dflash_engines": ROOT / "engines",
    "dflash_export": ROOT / "export",
    "dflash_tools": ROOT / "tools",
}
FORBIDDEN = {
    "dflash_runtime": {
        "dflash_engines", "dflash_export", "dflash_tools",
        "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "huggingface_hub", "safetensors",
    },
    "dflash_engines": {"dflash_export", "dflash_tools", "torch", "transformers", "huggingface_hub", "onnxscript"},
    "dflash_export": {"dflash_engines", "dflash_tools"},
    "dflash_tools": set(),
}  # fmt: skip
# Tools modules that a command opens only once it needs what an extra brings.
BEHIND_THE_DOOR = {"architecture_check", "architecture_table", "architectures"} | {
    "engine_check",
    "engine_logits",
    "gpu_check_bundles",
    "greedy_check",
    "hollow_bundle",
    "lowered_check",
    "network_weights",
    "pipeline",
    "ring_check",
    "weights_choice",
    "tiny_configs",
} | {
    "debug_graphs",
    "int8_product_graphs",
    "ort_probe",
    "portable_reference",
    "reference_building",
    "torch_int8_products",
    "torch_loading",
    "torch_oracle",
    "validate_bisect",
} | {
    "answer_attention",
    "answer_batch",
    "answer_linear",
    "answer_writing",
    "data_making",
    "drafter_card",
    "new_drafter",
    "tiny_target_training",
    "training_attention",
    "training_blocks",
    "training_checkpoint",
    "training_data",
    "training_evaluation",
    "training_loop",
    "training_head_rows",
    "training_loss",
    "training_processes",
    "training_run",
    "training_schedule",
    "training_start",
    "training_taps",
    "training_target",
} | {
    "serve_answers",
    "serve_app",
    "serve_grammar",
    "serve_limits",
    "serve_metrics",
    "serve_process",
    "serve_replies",
    "serve_session",
}  # fmt: skip
HEAVY = [
    "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "huggingface_hub", "safetensors",
    "starlette", "uvicorn", "prometheus_client", "llguidance",
]  # fmt: skip

TRAIN = ["train-drafter", "--target", "x", "--data", "x", "--out", "x"]

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def modules(package: str) -> list[str]:
    folder = LAYERS[package] / package
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run_without(blocked: list[str], code: str) -> subprocess.CompletedProcess[str]:
    source = BLOCK.format(blocked=set(blocked)) + code
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("package", LAYERS)
def test_no_module_imports_against_an_arrow(package: str) -> None:
    against = []
    for path in sorted((LAYERS[package] / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names = [node.module or ""]
            tops = {name.partition(".")[0] for name in names}
            against += [f"{path.name}:{node.lineno} {name}" for name in tops & FORBIDDEN[package]]
    assert against == []


def test_every_runtime_and_tools_module_imports_with_the_base_install() -> None:
    # A backend file imports its one library at the top; it is opened by name.
    behind = {f"dflash_runtime.{name}" for name in ("ort_cpu", "ort_engine", "cuda_device")}
    behind |= {f"dflash_tools.{name}" for name in BEHIND_THE_DOOR}
    names = [name for name in modules("dflash_runtime") + modules("dflash_tools") if name not in behind]
    done = run_without(HEAVY, f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n")
    assert done.returncode == 0, done.stderr


def test_the_ort_backend_imports_without_torch() -> None:
    done = run_without([name for name in HEAVY if name != "onnxruntime"], "import dflash_runtime.ort_cpu")
    assert done.returncode == 0, done.stderr


def test_every_engines_module_imports_where_torch_is_absent() -> None:
    names = modules("dflash_engines")
    blocked = ["torch", "transformers", "huggingface_hub", "onnxscript", "dflash_export", "dflash_tools"]
    done = run_without(blocked, f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "", "check-pair", "build", "add-drafter", "engines", "run", "chat", "serve", "inspect", "validate",
        "reference", "make-data", "train-drafter",
    ],
)  # fmt: skip
def test_help_works_with_the_base_install(command: str) -> None:
    arguments = [*([command] if command else []), "--help"]
    code = f"from dflash_tools.cli import main\nmain({arguments!r}, prog_name='dflash-export')\n"
    done = run_without(HEAVY, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: dflash-export")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["build", "--target", "x"], "export"), (["add-drafter", "x", "y"], "export"), (TRAIN, "export"),
        (["check-pair", "x", "y"], "export"), (["serve", "x"], "serve"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(arguments: list[str], extra: str) -> None:
    done = run_without(HEAVY, f"from dflash_tools.cli import main\nmain({arguments!r})\n")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert f"dflash-export[{extra}]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_runtime_imports_quickly() -> None:
    # Of the processor: what else the machine does says nothing about the import.
    code = "import time\nstart = time.process_time()\nimport dflash_runtime\nprint(time.process_time() - start)\n"
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    assert min(times) < 0.5
