"""The files that start Slotline elsewhere say what the code expects."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from honcho.environ import parse_procfile

from shared.settings import WorkerSettings
from slotline.cli import COMMANDS, cli

ROOT = Path(__file__).parent.parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_procfile_starts_one_side_each_with_our_commands() -> None:
    processes = parse_procfile((ROOT / "Procfile").read_text()).processes
    assert processes == {
        "web": "slotline web",
        "batches": "slotline batches",
        "worker": "slotline worker --cache-prompt",
    }


@pytest.mark.parametrize("name", ["web", "batches", "worker"])
def test_the_services_run_our_commands_from_our_targets(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["command"][0] == name
    assert f" AS {service['build']['target']}\n" in DOCKERFILE
    assert CliRunner().invoke(cli, [*service["command"], "--help"]).exit_code == 0
    known = {f"SLOTLINE_{field.upper()}" for field in WorkerSettings.model_fields} | {"SLOTLINE_HOST"}
    assert set(service["environment"]) <= known


@pytest.mark.parametrize("name", ["redis", "web", "batches", "worker"])
def test_every_service_comes_back_is_watched_and_gets_more_time_than_we_take(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    grace_s = int(re.fullmatch(r"(\d+)s", service["stop_grace_period"])[1])
    assert grace_s > WorkerSettings.model_fields["drain_s"].default + 10


def test_the_worker_has_a_gpu_and_its_model_and_redis_keeps_its_data() -> None:
    worker, redis = COMPOSE["services"]["worker"], COMPOSE["services"]["redis"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert worker["volumes"][0].endswith(":/models:ro")
    assert worker["environment"]["SLOTLINE_MODEL_PATH"].startswith("/models/")
    assert redis["volumes"] == ["redis-data:/data"]
    assert redis["command"][redis["command"].index("--appendonly") + 1] == "yes"


def test_web_and_batches_share_a_folder_for_files_that_is_theirs_to_write() -> None:
    services = COMPOSE["services"]
    for name in ("web", "batches"):
        url = services[name]["environment"]["SLOTLINE_FILES_URL"]
        assert services[name]["volumes"] == [f"files:{url}"]
        assert f"mkdir -p {url} && chown slotline {url}\n" in DOCKERFILE
    assert "files" in COMPOSE["volumes"]


@pytest.mark.parametrize("name", ["worker", "batches"])
def test_the_health_check_is_a_flag_we_have(name: str) -> None:
    command = COMPOSE["services"][name]["healthcheck"]["test"][2:]
    assert command[-1] == "--check"
    assert CliRunner().invoke(cli, [*command, "--help"]).exit_code == 0


@pytest.mark.parametrize("stage", ["web", "worker"])
def test_an_image_runs_our_command_and_not_as_root(stage: str) -> None:
    text = DOCKERFILE.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
    assert "\nUSER slotline\n" in text
    assert 'ENTRYPOINT ["slotline"]' in text
    assert f'CMD ["{stage}"]' in text


def test_the_web_image_has_no_llama_and_can_use_a_bucket() -> None:
    web = DOCKERFILE.partition(" AS web\n")[2].partition("\nFROM ")[0]
    assert ".[web,s3]" in web
    assert "llama" not in web


def make(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # The tests may themselves run under make, which tells its children so and lets them talk about directories.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    return subprocess.run(["make", *args], cwd=cwd, capture_output=True, text=True, check=False, timeout=60, env=env)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkout in which nothing has been made yet."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_make_alone_explains_itself(fresh: Path) -> None:
    assert "make up" in make(cwd=fresh).stdout


@pytest.mark.parametrize(("gpu", "flag"), [("cuda", "GGML_CUDA"), ("metal", "GGML_METAL"), ("vulkan", "GGML_VULKAN")])
def test_a_gpu_build_comes_first_and_never_from_the_cache(fresh: Path, gpu: str, flag: str) -> None:
    shown = make("-n", "up", f"GPU={gpu}", cwd=fresh).stdout
    build = next(line for line in shown.replace("\\\n", "").splitlines() if "CMAKE_ARGS" in line)
    assert f"-D{flag}=on" in build
    assert {"--no-cache-dir", "--force-reinstall", "--no-binary"} <= set(build.split())
    assert shown.index("CMAKE_ARGS") < shown.index(".[demo]")


def test_a_gpu_that_we_do_not_know_is_refused(fresh: Path) -> None:
    assert "GPU=tpu is not one of cpu, cuda, metal, vulkan" in make("up", "GPU=tpu", cwd=fresh).stderr


def test_make_up_passes_its_arguments_on(fresh: Path) -> None:
    shown = make("-n", "up", "PORT=9000", "MODEL=fake:echo", "SLOTS=2", "FRESH=1", cwd=fresh).stdout
    last = shown.rpartition("slotline up")[2].replace("\\\n", "")
    assert last.split() == ["--port", "'9000'", "--model", "'fake:echo'", "--slots", "'2'", "--fresh"]
    assert "up" in COMMANDS


def test_what_is_up_to_date_is_not_installed_again(fresh: Path) -> None:
    venv = fresh / ".venv"
    venv.mkdir()
    for stamp in (".created", ".test", ".demo", ".llama-cuda"):
        (venv / stamp).touch()
    for target in (["test"], ["check"], ["up", "GPU=cuda"]):
        assert " pip " not in make("-n", *target, cwd=fresh).stdout
    assert "GGML_VULKAN" in make("-n", "up", "GPU=vulkan", cwd=fresh).stdout


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("3.10.4", "Slotline needs Python 3.11 or newer, and ./python is Python 3.10.4"),
        (None, "./python is not installed"),
    ],
)
def test_a_python_that_will_not_do_is_named(fresh: Path, version: str | None, message: str) -> None:
    if version:
        old = fresh / "python"
        old.write_text(f'#!/bin/sh\n[ "$1" = -V ] && echo \'Python {version}\'\n[ "$1" = -V ]\n')
        old.chmod(0o755)
    made = make("test", "PYTHON=./python", cwd=fresh)
    assert made.returncode == 2
    assert message in made.stderr
    assert not (fresh / ".venv").exists()


def test_a_missing_compiler_is_named(fresh: Path) -> None:
    tools = fresh / "tools"
    tools.mkdir()
    for name, target in (("sh", shutil.which("sh")), ("cc", "/bin/true"), ("python3", sys.executable)):
        (tools / name).symlink_to(target)
    made = subprocess.run(
        [shutil.which("make"), "test"],
        cwd=fresh,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert "there is no c++" in made.stderr


def test_the_check_of_a_clean_clone_runs_tests_and_lint() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert script.index("\nmake test") < script.index("\nmake check")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_version_has_one_home() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "slotline/__init__.py"
    assert "version" in project["project"]["dynamic"]


def test_the_client_needs_three_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.match("[a-z]+", name)[0] for name in project["dependencies"]] == ["httpx", "click", "rich"]
    web = " ".join(project["optional-dependencies"]["web"] + project["optional-dependencies"]["queue"])
    assert "llama" not in web
