from __future__ import annotations

from benchmarks.compare import table
from benchmarks.usage import part_of


def test_a_ratio_is_the_median_of_the_rounds_and_above_1_where_we_are_better() -> None:
    rounds = [
        {"slotline": {"gen_tok_s": ours, "ttft_p50": 10}, "llama-server": {"gen_tok_s": theirs, "ttft_p50": 15}}
        for ours, theirs in [(100, 100), (300, 100), (240, 200)]
    ]
    _, _, tokens, ttft = table({"eight": rounds}).splitlines()
    assert tokens.endswith("| new tokens/s | 100.0 | 240.0 | **1.20** (1.00 to 3.00) |")
    assert ttft.endswith("| TTFT p50, ms | 15.0 | 10.0 | **1.50** (1.50 to 1.50) |")


def test_without_another_server_there_is_no_ratio() -> None:
    assert table({"prefix": [{"slotline": {"req_s": 8, "ttft_p50": 10}}]}).splitlines()[2].endswith("|  | 8.0 |  |")


def test_a_part_is_named_after_the_command_of_its_process() -> None:
    python = ["/venv/bin/python", "-P", "-m", "slotline"]
    assert part_of([*python, "web"]) == "web"
    assert part_of([*python, "worker"]) == "worker"
    assert part_of([*python, "worker", "--model-process-of", "7"]) == "model"
    assert part_of(["/somewhere/valkey-server", "--port", "1"]) == "valkey-server"
