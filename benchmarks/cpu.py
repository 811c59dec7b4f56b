"""CPU time of a generated token on its way to the HTTP client, by process and thread (Linux).

    python -m benchmarks.cpu                          the scripted model, a pass of 30 ms
    python -m benchmarks.cpu --model demo             the demo model

With the scripted model whatever is used is Slotline's own. The model process is shown by thread: `engine` is the
tick loop, `publisher` writes to Redis. Each round has the same requests; the medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.run import LoadRun, load_command
from benchmarks.servers import Slotline, end_on_signal, model_path
from benchmarks.usage import cpu_by_part, cpu_since

NAMED_THREADS = str(Path(__file__).parent / "named_threads")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="CPU time of a generated token, by process and thread.")
    parser.add_argument("--model", default="fake:babble:0.03", help="GGUF file, fake:SCRIPT:SECONDS, or demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--load-script", type=Path, help="another load generator with the same options")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_on_signal()
    model = model_path(options.model)
    flags = ["--concurrency", str(options.callers), "--requests", str(options.requests), "--ignore-eos"]
    flags += ["--max-tokens", str(options.max_tokens)]
    rounds: list[dict[str, float]] = []
    with Slotline(model, options.callers, 16384, 2, {"PYTHONPATH": NAMED_THREADS}) as server:
        run = LoadRun(load_command(options.load_script), server.url)
        run(["--concurrency", str(options.callers), "--requests", str(options.callers)])  # warm
        for _ in range(options.rounds):
            before = cpu_by_part(server.process.pid)
            figures = run(flags)
            used = cpu_since(server.process.pid, before)
            used["load generator"] = figures["cpu_s"]
            parts = {name: seconds / figures["gen"] * 1e6 for name, seconds in used.items()}
            rounds.append(parts)
    medians = {name: round(statistics.median(r.get(name, 0.0) for r in rounds), 1) for name in rounds[0]}
    if options.json:
        print(json.dumps(medians))
        return
    print("| part | CPU µs a token |\n| --- | --- |")
    for name, value in sorted(medians.items(), key=lambda item: -item[1]):
        if value >= 0.5:
            print(f"| {name} | {value:g} |")


if __name__ == "__main__":
    main()
