"""Asks the package index whether every JetPack has wheels for what `dflash-export[jetson]` needs; installs nothing.

    python -m dflash_tools.jetson_wheels
    python -m dflash_tools.jetson_wheels --download DIR --jetpack 6.1/6.2      # for a board without a network

A board compiles nothing: one package without a wheel for its Python and aarch64 is an installation that fails there.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from dflash_runtime.errors import DFlashError
from dflash_tools.error_lines import DFlashCommand, needs_extra

# Jetson Linux 36 is Ubuntu 22.04 with glibc 2.35, Jetson Linux 38 and 39 are 24.04 with 2.39.
_GLIBC_MINOR = {"3.10": 35, "3.12": 39}
_OLDEST_GLIBC_MINOR = 17


@click.command(cls=DFlashCommand)
@click.option("--extra", default="jetson", show_default=True)
@click.option("--jetpack", help="One row of the table, as 6.1/6.2. [default: all]")
@click.option("--download", type=click.Path(path_type=Path), help="Put the wheels there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(extra: str, jetpack: str | None, download: Path | None, as_json: bool) -> None:
    """Resolves the runtime and the engine builder for each JetPack."""
    with needs_extra("engines"):
        from dflash_engines.tensorrt_versions import JETPACKS
    rows = [row for row in JETPACKS if jetpack in (None, row.name)]
    if not rows:
        raise DFlashError(f"There is no JetPack {jetpack!r}; known are {', '.join(row.name for row in JETPACKS)}.")
    if download is not None and len(rows) != 1:
        raise DFlashError("--download is for one board: name it with --jetpack.")
    found = {row.name: resolve(extra, row.python, download) for row in rows}
    if as_json:
        click.echo(json.dumps(found))
        return
    for row in rows:
        packages = found[row.name]
        click.echo(f"JetPack {row.name}: Python {row.python}, {len(packages)} wheels for aarch64")
        click.echo("  " + ", ".join(f"{name} {version}" for name, version in sorted(packages.items())))


def requirements(extra: str, python: str) -> list[str]:
    """What this distribution and one of its extras need under a Python version.

    Raises:
        DFlashError: there is no such extra.
    """
    from packaging.requirements import Requirement

    metadata = importlib.metadata.metadata("dflash-export")
    if extra not in (metadata.get_all("Provides-Extra") or []):
        raise DFlashError(f"dflash-export has no extra {extra!r}.")
    environment = {"python_version": python, "platform_machine": "aarch64", "extra": extra}
    needed = [Requirement(text) for text in importlib.metadata.requires("dflash-export") or []]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]


def resolve(extra: str, python: str, download: Path | None = None) -> dict[str, str]:
    """The versions pip would install on an aarch64 board, all as wheels.

    Args:
        extra: Of this distribution.
        python: `3.10`.
        download: Folder for the wheels; None only resolves.

    Raises:
        DFlashError: a package has no wheel there; the message is pip's.
    """
    newest = _GLIBC_MINOR[python]
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(newest, _OLDEST_GLIBC_MINOR - 1, -1)]
    argv = [sys.executable, "-m", "pip", "download" if download else "install", "--quiet"]
    argv += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    argv += ["--python-version", python]
    for platform in [*platforms, "manylinux2014_aarch64"]:
        argv += ["--platform", platform]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        if download is not None:
            argv += ["--dest", str(download)]
        else:
            argv += ["--dry-run", "--ignore-installed", "--target", scratch, "--report", str(report)]
        done = subprocess.run([*argv, *requirements(extra, python)], capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        if done.returncode != 0:
            raise DFlashError(f"Python {python} on aarch64: {' '.join(errors) or done.stderr.strip()}")
        if download is not None:
            wheels = [path.name.split("-") for path in sorted(download.glob("*.whl"))]
            return {name: version for name, version, *_ in wheels}
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in installs}


if __name__ == "__main__":
    main()
