"""How tests validate a bundle: references made and kept, levels one by one, and what healthy means."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from faulty_loops import RuntimeFault
from pairs import quiet
from planted_faults import Fault

from dflash_runtime.bundle import Bundle
from dflash_tools.graph_probe import ProbeBackend
from dflash_tools.reference_building import build_reference
from dflash_tools.reference_file import Reference, read_reference, write_reference
from dflash_tools.validate_engine import BundleEngine
from dflash_tools.validate_run import validate
from dflash_tools.validate_verdict import Verdict

LEVELS = ("graph", "state", "tokens", "acceptance")


def make(bundle: Path, folder: Path, **options: Any) -> None:
    write_reference(build_reference(Bundle.open(bundle, check_files=False), None, None, quiet, **options), folder)


def stored(folder: Path) -> Reference:
    (place,) = folder.iterdir()
    return read_reference(place)


def first_failure(bundle: Path, engine: Any, reference: Reference) -> Verdict | None:
    """Levels one by one; the first that fails."""
    opened = Bundle.open(bundle, check_files=False)
    for level in LEVELS:
        (verdict,) = validate(opened, engine(opened), reference, quiet, (level,)).verdicts
        if verdict.status == "failed":
            return verdict
    return None


def assert_fault_is_named(healthy: Path, reference: Reference, folder: Path, fault: Fault) -> None:
    """A fault planted in a copy is caught by its level, with the tensor that shows it first and its cause."""
    bundle = shutil.copytree(healthy, folder / "b")
    fault.change(bundle)
    verdict = first_failure(bundle, ort_cpu, reference)
    assert verdict is not None and verdict.first is not None
    found = verdict.first
    assert (verdict.level, found.graph, found.layer, found.part) == (fault.level, fault.graph, fault.layer, fault.part)
    assert fault.tensor in found.tensor and fault.cause in found.cause
    assert found.found != found.expected


def assert_loop_fault_is_named(bundle: Path, reference: Reference, fault: RuntimeFault) -> None:
    """A loop that goes wrong over right graphs is caught by its level, with the tensor that shows it first."""

    class Faulty(BundleEngine):
        def backend(self) -> ProbeBackend:
            manifest = self.bundle.manifest
            return fault.backend(self.probe(manifest.max_context_tokens + 16), manifest, 16)

    verdict = first_failure(bundle, lambda opened: Faulty(opened, "ort-cpu", 1), reference)
    assert verdict is not None and verdict.first is not None
    found = verdict.first
    assert (verdict.level, found.graph, found.layer, found.part) == (fault.level, fault.graph, fault.layer, fault.part)


def assert_healthy(bundle: Path, engine: Any, reference: Reference) -> None:
    opened = Bundle.open(bundle, check_files=False)
    found = validate(opened, engine(opened), reference, quiet, LEVELS)
    assert [verdict.first for verdict in found.verdicts] == [None] * len(LEVELS)
    assert found.passed


def portable(bundle: Bundle) -> BundleEngine:
    return BundleEngine(bundle, "portable")


def ort_cpu(bundle: Bundle) -> BundleEngine:
    return BundleEngine(bundle, "ort-cpu", threads=1)


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from dflash_tools.cli import main
main(["validate", {bundle!r}, "--json", "--level", "graph", "--level", "state", "--level", "tokens"])
"""
TORCH = ["torch", "transformers", "huggingface_hub", "safetensors"]


def replay_without(blocked: list[str], bundle: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and result of `validate` where the blocked packages cannot be imported, as on a device."""
    code = WITHOUT.format(blocked=blocked, bundle=str(bundle))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
