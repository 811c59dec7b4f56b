"""`slotline tune`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slotline.cli.bench import demo_model
from slotline.cli.chart import Mark, scatter
from slotline.cli.faults import BadSetup
from slotline.cli.flags import settings_options
from slotline.cli.show import json_option, print_json
from slotline.program import program

if TYPE_CHECKING:
    from shared.settings import WorkerSettings
    from worker.tune import Findings

#: Settings of the worker that make a difference here.
FLAGS = (
    "n_ctx", "n_gpu_layers", "main_gpu", "split_mode", "tensor_split", "n_batch", "n_ubatch", "chunk_size",
    "kv_unified", "threads", "threads_batch", "cache_type_k", "cache_type_v", "flash_attn", "use_mlock",
    "itl_target_ms",
)  # fmt: skip


def tune() -> click.Command:
    """The command `slotline tune`."""
    from shared.settings import WorkerSettings

    def run(model: str | None, seconds: float, as_json: bool, **given: Any) -> None:
        """Measure a model with 1 to 64 slots, and print the worker's command that serves it best.

        It takes the settings of `slotline worker`, from flags and SLOTLINE_… variables, on a machine that does
        nothing else meanwhile. Best are the fewest slots with nearly the most tokens per second, among those that keep
        the time between two tokens below --itl-target-ms.
        """
        settings = _settings(model or demo_model(), given)
        findings = _measure(settings, seconds)
        command = command_of(settings, given, findings)
        if as_json:
            print_json({"model": settings.model_path, **asdict(findings), "command": command})
        else:
            _show(findings, command)

    options: list[click.Parameter] = [
        click.Option(["--model"], metavar="PATH", help="GGUF file, or fake:echo; left out, the demo model."),
        click.Option(
            ["--seconds"], type=click.FloatRange(1, 3600), default=60, show_default=True, help="Time, without loading."
        ),
        *(option for option in settings_options(WorkerSettings) if option.name in FLAGS),
    ]
    return json_option(click.Command("tune", callback=run, params=options, help=run.__doc__))


def command_of(settings: WorkerSettings, given: dict[str, Any], findings: Findings) -> str:
    """The line to paste: what was found, and the flags that it was found with."""
    words = [*shlex.split(program()), "worker", "--model", settings.model_path]
    words += ["--n-parallel", str(findings.best.slots), "--n-ctx", str(findings.n_ctx)]
    for name, value in given.items():
        if value is None or name == "n_ctx":
            continue
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return shlex.join(words)


def _settings(path: str, given: dict[str, Any]) -> WorkerSettings:
    from shared.settings import SettingsError, WorkerSettings, load

    try:
        return load(WorkerSettings, {**given, "model_path": path, "n_parallel": "auto"}, otherwise={"n_ctx": 0})
    except SettingsError as error:
        raise BadSetup(str(error)) from None


def _measure(settings: WorkerSettings, seconds: float) -> Findings:
    from worker.backend import ModelError
    from worker.tune import measure

    try:
        return measure(settings, seconds, lambda text: click.echo(f"slotline: {text}", err=True))
    except ModelError as error:
        raise BadSetup(str(error)) from None


def _show(findings: Findings, command: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("slots", "tokens/s", "ms per token", box=SIMPLE_HEAD)
    for point in findings.points:
        style = "bold green" if point == findings.best else None
        table.add_row(str(point.slots), f"{point.tok_s:.1f}", f"{point.ms_per_token:.1f}", style=style)
    console.print(table)
    marks = [
        Mark(p.ms_per_token, p.tok_s, f"[{p.slots}]" if p == findings.best else str(p.slots)) for p in findings.points
    ]
    for line in scatter(marks, "ms per token, for each number of slots", "tokens/s"):
        console.print(line, markup=False, soft_wrap=True)
    prefill, depth = findings.prefill_tok_s, findings.depth
    console.print(f"\nPrefill {prefill:.0f} tokens/s. Decode was measured with {depth} tokens in each slot.")
    console.print(f"Best is [{findings.best.slots}]:\n", markup=False)
    console.print(f"  {command}", markup=False, soft_wrap=True, style="bold")
