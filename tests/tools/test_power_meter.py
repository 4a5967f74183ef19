from __future__ import annotations

import sys
import time

import pytest

from dflash_tools.power_meter import PowerMeter, energy_joules, parse_nvidia_smi, parse_tegrastats

ORIN_NX = (
    "11-30-2026 12:00:00 RAM 3263/15656MB (lfb 7x4MB) SWAP 0/7828MB (cached 0MB) CPU [2%@729,0%@729,off,off] "
    "EMC_FREQ 0%@2133 GR3D_FREQ 0%@[306] cpu@48.5C soc2@47C tj@48.5C VDD_IN 4966mW/4912mW VDD_CPU_GPU_CV 643mW/630mW "
    "VDD_SOC 1447mW/1440mW"
)
AGX_ORIN = (
    "RAM 2769/62849MB (lfb 12x4MB) CPU [0%@729] GR3D_FREQ 0% cpu@44C VDD_GPU_SOC 1986mW/1986mW VDD_CPU_CV 397mW/397mW "
    "VIN_SYS_5V0 3022mW/3022mW NC 0mW/0mW VDDQ_VDD2_1V8AO 302mW/302mW NC 0mW/0mW"
)
THOR = "RAM 5000/125772MB CPU [1%@972] VDD_GPU 3566mW/3566mW VDD_CPU_SOC_MSS 5943mW/5943mW VIN 23200mW/23000mW"


@pytest.mark.parametrize(
    ("line", "watts"),
    [(ORIN_NX, 4.966), (AGX_ORIN, (1986 + 397 + 3022 + 302) / 1000), (THOR, 23.2), ("RAM 1/2MB CPU [1%@7]", None)],
)
def test_tegrastats(line: str, watts: float | None) -> None:
    assert parse_tegrastats(line) == (None if watts is None else pytest.approx(watts))


def test_nvidia_smi() -> None:
    assert parse_nvidia_smi("64.21\n") == 64.21
    assert parse_nvidia_smi("[N/A]\n") is None


def test_energy_by_hand() -> None:
    samples = [(0.0, 10.0), (1.0, 20.0), (2.0, 20.0)]
    assert energy_joules(samples, 0.0, 2.0) == pytest.approx(15 + 20)
    assert energy_joules(samples, 0.5, 1.5) == pytest.approx(0.5 * 17.5 + 0.5 * 20)
    assert energy_joules(samples, 1.25, 1.5) == pytest.approx(5)


@pytest.mark.parametrize(("started", "ended"), [(-0.1, 1.0), (1.0, 2.1)])
def test_what_the_samples_do_not_reach_is_not_made_up(started: float, ended: float) -> None:
    assert energy_joules([(0.0, 10.0), (2.0, 20.0)], started, ended) is None
    assert energy_joules([], 0.0, 1.0) is None


def test_a_command_is_read_while_it_runs() -> None:
    code = f"import time\nwhile True:\n    print({ORIN_NX!r}, flush=True)\n    time.sleep(0.01)\n"
    with PowerMeter(uses_gpu=False, command=[sys.executable, "-c", code]) as meter:
        deadline = time.monotonic() + 20
        while len(meter.samples) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, last = meter.samples[0][0], meter.samples[-1][0]
    assert meter.energy_joules(first, last) == pytest.approx(4.966 * (last - first))
    assert meter.source


def test_without_a_source_there_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with PowerMeter(uses_gpu=True) as meter:
        assert meter.source is None
    assert meter.energy_joules(0, 1) is None
