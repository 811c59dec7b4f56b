"""Slotline beside llama.cpp's own server: the same model, the same requests over HTTP, taken in turn.

    python -m benchmarks.compare --llama-server PATH [--rounds 5] [--only NAME] [--load-script PATH]

Both servers run all the time, on loopback, and the one whose turn it is not must be idle. Each round gives every
workload to both, the order of the two changing from round to round; what counts is the median of the rounds' ratios.
`--json FILE` keeps every figure. Build `llama-server` from the sources in llama-cpp-python's package, so that both
have the same kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chat import chat_turns
from benchmarks.preempt import preempt
from benchmarks.run import LoadRun, load_command
from benchmarks.servers import LlamaServer, Server, Slotline, end_on_signal, model_path
from benchmarks.usage import cpu_by_part, cpu_since

#: A server that is not asked anything may use so much of a core: ours polls its queues.
IDLE_SHARE = 0.08


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, and the figures that are compared. `lower` is better for times."""

    name: str
    what: str
    flags: str
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()


#: The first rate or time of each is the one to judge by. `--prompt-tokens` counts words; two more stand before them.
WORKLOADS = (
    Workload(
        "eight",
        "8 callers, 27 requests, about 68 prompt + 64 new tokens",
        "--concurrency 8 --requests 27 --prompt-tokens 64 --max-tokens 64 --ignore-eos",
        ("gen_tok_s",),
        ("ttft_p50",),
    ),
    Workload(
        "varied",
        "16 callers, 48 requests, 16 to 112 new tokens",
        "--concurrency 16 --requests 48 --prompt-tokens 64 --max-tokens 64 --vary --ignore-eos",
        ("gen_tok_s",),
    ),
    Workload(
        "prefix",
        "8 callers, 32 requests, 600 words in common + 16, 16 new tokens",
        "--concurrency 8 --requests 32 --shared-prefix 600 --prompt-tokens 16 --max-tokens 16 --ignore-eos",
        ("req_s",),
        ("ttft_p50",),
    ),
    Workload(
        "one",
        "one caller, 4 requests, 64 new tokens",
        "--concurrency 1 --requests 4 --prompt-tokens 64 --max-tokens 64 --ignore-eos",
        ("gen_tok_s",),
        ("ttft_p50",),
    ),
)
CHAT = Workload("chat", "a chat of 6 turns, the first token of turn 6", "", (), ("ttft",))
PREEMPT = "preempt"
NAMES = (*(workload.name for workload in WORKLOADS), CHAT.name, PREEMPT)


def main() -> None:
    """The command."""
    options = _options()
    end_on_signal()
    model = model_path(options.model)
    chosen = options.only or NAMES
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in chosen}
    size = (model, options.slots, options.n_ctx, options.threads)
    with ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(Slotline(*size, dict(options.set)))]
        if options.llama_server is not None and chosen != [PREEMPT]:
            flags, env = options.llama_flags.split(), dict(options.llama_env)
            servers.append(stack.enter_context(LlamaServer(*size, options.llama_server, flags, env)))
        comparison = Comparison(servers, load_command(options.load_script))
        comparison.warm()
        for number in range(options.rounds):
            for name in chosen:
                found = comparison.round(name, number)
                rounds[name].append(found)
                print(f"round {number + 1} {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")
    print(table(rounds))


class Comparison:
    """The servers, and one round of a workload on each."""

    def __init__(self, servers: Sequence[Server], command: Sequence[str]) -> None:
        self._servers = servers
        self._command = command

    def warm(self) -> None:
        """A few requests to each, so that nothing is done for the first time later."""
        for server in self._servers:
            LoadRun(self._command, server.url)(["--concurrency", "8", "--requests", "8", "--max-tokens", "8"])

    def round(self, name: str, number: int) -> dict[str, dict[str, Any]]:
        """The figures of each server by its name.

        Raises:
            RuntimeError: a request failed, or the other server was busy meanwhile.
        """
        if name == PREEMPT:
            return {self._servers[0].name: preempt(self._servers[0].url, number)}
        order = self._servers if number % 2 == 0 else list(reversed(self._servers))
        return {server.name: self._turn(server, name, number) for server in order}

    def _turn(self, server: Server, name: str, number: int) -> dict[str, Any]:
        others = [other for other in self._servers if other is not server]
        before = {each: cpu_by_part(each.process.pid) for each in self._servers}
        if name == CHAT.name:
            figures = chat_turns(server.url, number)
        else:
            (workload,) = (w for w in WORKLOADS if w.name == name)
            # Other words each time, or what is compared is who remembers the prompts of the last one.
            seed = ["--prompt-seed", str(7 + number * len(NAMES) + NAMES.index(name))]
            figures = LoadRun(self._command, server.url)([*workload.flags.split(), *seed])
        used = {each: sum(cpu_since(each.process.pid, before[each]).values()) for each in self._servers}
        for other in others:
            share = used[other] / figures["wall_s"]
            if share > IDLE_SHARE:
                raise RuntimeError(f"{other.name} used {share:.0%} of a core while {server.name} was measured")
        return figures | {"server_cpu_s": round(used[server], 2)}


def table(rounds: Mapping[str, Sequence[Mapping[str, Mapping[str, Any]]]]) -> str:
    """The medians as Markdown: a ratio above 1 is in Slotline's favour, also where less is better."""
    lines = ["| workload | figure | llama-server | Slotline | ratio |", "| --- | --- | --- | --- | --- |"]
    for workload in (*WORKLOADS, CHAT):
        found = rounds.get(workload.name)
        if not found:
            continue
        for key in (*workload.higher, *workload.lower):
            ours = [r["slotline"][key] for r in found]
            theirs = [r["llama-server"][key] for r in found if "llama-server" in r]
            pairs = list(zip(ours, theirs, strict=True)) if theirs else []
            ratios = [theirs / ours if key in workload.lower else ours / theirs for ours, theirs in pairs]
            lines.append(
                f"| {workload.what} | {LABELS[key]} | {_median(theirs)} | {_median(ours)} | {_spread(ratios)} |"
            )
    for key in ("idle_ttft", "busy_ttft", "lost") if rounds.get(PREEMPT) else ():
        values = [r["slotline"][key] for r in rounds[PREEMPT]]
        lines.append(f"| interactive calls beside batch jobs in all slots | {LABELS[key]} | | {_median(values)} | |")
    return "\n".join(lines)


LABELS = {
    "gen_tok_s": "new tokens/s",
    "req_s": "requests/s",
    "ttft_p50": "TTFT p50, ms",
    "ttft": "TTFT, ms",
    "idle_ttft": "TTFT of an idle worker, ms",
    "busy_ttft": "TTFT with all slots taken by batch jobs, ms",
    "lost": "tokens of all lost to the changing of places, %",
}


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else ""


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Slotline and llama.cpp's own server side by side.")
    parser.add_argument("--llama-server", type=Path, help="its binary; left out, Slotline alone is measured")
    parser.add_argument("--llama-flags", default="", help="more flags for it, in one string")
    pair: dict[str, Any] = {
        "action": "append",
        "default": [],
        "type": lambda text: tuple(text.split("=", 1)),
        "metavar": "NAME=VALUE",
    }
    parser.add_argument("--llama-env", **pair, help="a variable of its environment")
    parser.add_argument("--set", **pair, help="a variable of Slotline's, as in SLOTLINE_FLUSH_S=0.05")
    parser.add_argument("--model", default="demo", help="GGUF file; left out, the demo model")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--n-ctx", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=NAMES, help="this workload; may be repeated")
    parser.add_argument("--load-script", type=Path, help="another load generator with the options of benchmarks.load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures of all rounds go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
