"""Cycle times that `plan` predicts against those `tune` measured on this device, block size by block size.

    python -m dflash_tools.plan_times_against_measured BUNDLE --backend tensorrt --device orin-nx-16gb

Nothing is judged: the prediction is a roofline with assumed efficiencies, and this says how far off it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_runtime.errors import EngineError
from dflash_tools import plan_formulas as formulas
from dflash_tools.device_table import Device, find_device
from dflash_tools.engine_place import find_engine_place
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.model_shape import DrafterShape, ModelShape
from dflash_tools.plan_against_measured import plan_shapes, stored_as
from dflash_tools.speed_profile import CycleCost, SpeedProfile, read_profiles
from dflash_tools.this_device import find_this_device


@dataclasses.dataclass(frozen=True)
class TimeComparison:
    """One cycle: draft, verify, append; or a plain step."""

    block_size: int
    """1 is plain decoding."""
    context_tokens: int
    predicted_ms: float
    measured_ms: float
    """Median."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_ms / self.predicted_ms


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["tensorrt", "tensorrt-rtx"]), required=True, help="Whose engines.")
@click.option("--device", default="auto", show_default=True, metavar="NAME|auto", help="Row of the device table.")
@click.option("--target", help="Checkpoint the bundle was built from. [default: where the bundle says it lay]")
@click.option("--drafter", help="The same for its drafter.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, backend: str, device: str, target: str | None, drafter: str | None, as_json: bool
) -> None:
    """Compares the plan's times with every profile that `dflash-export tune` has kept beside BUNDLE's engines."""
    opened = Bundle.open(bundle)
    folder = find_engine_place(opened, backend).folder
    record = DeviceEngineRecord.read(folder, f"Run: dflash-export engines {bundle} --backend {backend}")
    profiles = [profile for profile in read_profiles(folder) if profile.backend == backend]
    if not profiles:
        raise EngineError(f"{folder} has no speed profile. Run: dflash-export tune {bundle} --backend {backend}")
    place = find_this_device().device if device.lower() == "auto" else find_device(device)
    shapes = plan_shapes(opened, target, drafter)
    found = [(profile, list(compare_times(opened, *shapes, record, place, profile))) for profile in profiles]
    if as_json:
        facts = [
            {"conditions": dataclasses.asdict(profile.conditions), "made": profile.made,
             "times": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]}
            for profile, rows in found
        ]  # fmt: skip
        click.echo(json.dumps({"device": place.name, "profiles": facts}))
        return
    for profile, rows in found:
        for line in _lines(place, profile, rows):
            click.echo(line)


def compare_times(
    bundle: Bundle, target: ModelShape, drafter: DrafterShape | None, record: DeviceEngineRecord, device: Device,
    profile: SpeedProfile,
) -> Iterator[TimeComparison]:
    """Predicted and measured time of every cycle a profile knows."""
    from dflash_engines.tensorrt_versions import cache_layouts

    layouts = [] if record.form == "fused" else cache_layouts("primitive", record.capacity_rows)
    storage, own = stored_as(bundle.manifest, "target"), stored_as(bundle.manifest, "drafter")

    def predicted_s(cost: CycleCost) -> float:
        rows, depth = cost.block_size, cost.context_tokens
        verify = formulas.verify_s(device, target, storage, rows, depth, layouts)
        if rows == 1 or drafter is None:
            return verify
        draft = formulas.draft_s(device, target, drafter, storage, own, rows, depth, layouts)
        return draft + verify + formulas.append_s(device, drafter, own, rows)

    for cost in profile.costs:
        yield TimeComparison(cost.block_size, cost.context_tokens, predicted_s(cost) * 1e3, cost.median_ms)


def _lines(device: Device, profile: SpeedProfile, rows: list[TimeComparison]) -> Iterator[str]:
    mode = profile.conditions.power_mode or "power mode unknown"
    yield f"{device.label}, measured on {profile.conditions.device} ({mode}), {profile.made}"
    yield "  block  context  predicted ms  measured ms  measured/predicted"
    for row in rows:
        block = "plain" if row.block_size == 1 else str(row.block_size)
        times = f"{row.predicted_ms:>12.2f}{row.measured_ms:>13.2f}{row.ratio:>20.2f}"
        yield f"  {block:>5}{row.context_tokens:>9}  {times}"


if __name__ == "__main__":
    main()
