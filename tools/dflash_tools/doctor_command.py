"""`dflash-export doctor`: what this machine has, which traps it is in, what each backend lacks here."""

from __future__ import annotations

import dataclasses
import json

import click

from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand
from dflash_tools.machine_probe import Machine


@click.command("doctor", cls=DFlashCommand, short_help="Say what this machine has and what each backend lacks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: facts, traps, backends.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Says what this machine has, which known traps it is in, what each backend needs and lacks, and what to type.

    Reads only; changes nothing. Needs nothing but the base install.

    \b
    Exit code 0: at least one backend can run here.
    Exit code 1: none can.
    """  # noqa: D301 - click reads the \b character: keep these lines as they are
    from dflash_runtime.backend import AVAILABLE
    from dflash_tools.doctor_backends import backend_reports
    from dflash_tools.doctor_reading import read_facts
    from dflash_tools.doctor_report import report_lines
    from dflash_tools.doctor_traps import find_traps

    machine = ctx.obj if isinstance(ctx.obj, Machine) else Machine()
    facts = read_facts(machine)
    traps = find_traps(facts)
    backends = backend_reports(facts, traps, AVAILABLE)
    ready = [backend.name for backend in backends if backend.can_run]
    if as_json:
        told = {
            "facts": dataclasses.asdict(facts),
            "traps": [dataclasses.asdict(trap) for trap in traps],
            "backends": [{**dataclasses.asdict(backend), "can_run": backend.can_run} for backend in backends],
            "ready": ready,
        }
        click.echo(json.dumps(told, ensure_ascii=False))
    else:
        for line in report_lines(facts, traps, backends):
            click.echo(line)
    if not ready:
        ctx.exit(EXIT_REFUSED)
