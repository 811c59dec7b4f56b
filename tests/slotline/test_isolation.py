"""The client works with its own dependencies alone, also inside a project with packages of our names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slotline

PACKAGE = Path(slotline.__file__).parent
ROOT = PACKAGE.parent
OURS = {"shared", "webapi", "worker"}

#: What the extras bring, as an installation of the client alone would miss it.
BLOCK = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
"""


def imported_at_load(tree: ast.Module) -> set[str]:
    """Top names of what a module imports when it is loaded: not in functions, not for type checkers only."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        todo += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_other_packages_are_imported_inside_functions_only(path: Path) -> None:
    assert not imported_at_load(ast.parse(path.read_text())) & OURS


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with packages of our names that must not be touched."""
    for name in OURS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the project\\'s own {name} was imported')")
    return tmp_path


def python(cwd: Path, *args: str, path: str = str(ROOT), **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def without_extras() -> str:
    from slotline.cli.faults import EXTRA_MODULES

    return BLOCK.format(absent=sorted(EXTRA_MODULES))


def test_the_client_needs_its_own_dependencies_alone(project: Path) -> None:
    code = f"{without_extras()}\nfrom slotline import Client\nClient('http://127.0.0.1:9').close()\nprint('well')"
    ran = python(project, "-c", code)
    assert (ran.stdout, ran.stderr) == ("well\n", "")


def test_importing_the_package_brings_no_http_client(project: Path) -> None:
    ran = python(project, "-c", "import sys, slotline; print({'httpx', 'ssl', 'click'} & set(sys.modules))")
    assert (ran.stdout, ran.stderr) == ("set()\n", "")


COMMAND = "\nimport sys\nsys.argv[0] = 'slotline'\nfrom slotline.__main__ import main\nmain()"


@pytest.mark.parametrize("command", ["submit", "status", "list", "cancel", "models", "stats", "batch", "version"])
def test_a_client_command_needs_no_extra(project: Path, command: str) -> None:
    ran = python(project, "-c", without_extras() + COMMAND, command, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"Usage: slotline {command}")


def test_a_batch_run_on_a_server_needs_no_extra(project: Path) -> None:
    (project / "in.jsonl").write_text('{"prompt": "a"}\n')
    args = ["batch", "run", "in.jsonl", "-o", "out.jsonl", "--url", "http://127.0.0.1:9"]
    ran = python(project, "-c", without_extras() + COMMAND, *args)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "slotline: no server answers at http://127.0.0.1:9\n"


@pytest.mark.parametrize(
    ("args", "extra"),
    [(["web"], "web"), (["worker", "--help"], "worker"), (["up"], "demo"), (["bench", "engine"], "worker")],
)
def test_a_command_without_its_extra_says_what_to_install(project: Path, args: list[str], extra: str) -> None:
    ran = python(project, "-c", without_extras() + COMMAND, *args)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1
    assert f"pip install 'slotline[{extra}]'" in ran.stderr


def test_the_list_of_commands_needs_no_extra(project: Path) -> None:
    ran = python(project, "-c", without_extras() + COMMAND, "--help")
    assert ran.returncode == 0
    assert "worker" in ran.stdout


@pytest.mark.parametrize("path", [str(ROOT), f"{os.pathsep}{ROOT}", f".{os.pathsep}{ROOT}", "PROJECT"])
def test_a_projects_own_packages_never_take_the_place_of_ours(project: Path, path: str) -> None:
    path = path.replace("PROJECT", f"{project}{os.pathsep}{ROOT}")
    ran = python(project, "-m", "slotline", "--version", path=path)
    assert (ran.stdout, ran.stderr) == (f"slotline {slotline.__version__}\n", "")
    for command in ("web", "worker"):
        assert python(project, "-m", "slotline", command, "--help", path=path).returncode == 0


def test_packages_named_first_in_the_path_from_elsewhere_do_not_either(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran = python(elsewhere, "-m", "slotline", "worker", "--help", path=f"{project}{os.pathsep}{ROOT}")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_checkout_works_without_being_installed() -> None:
    ran = python(ROOT, "-m", "slotline", "--version", path="")
    assert ran.stdout == f"slotline {slotline.__version__}\n"


def test_a_directory_that_has_been_removed_is_no_obstacle(tmp_path: Path) -> None:
    start = f"os.execv({sys.executable!r}, ['python', '-m', 'slotline', '--version'])"
    code = f"import os; os.rmdir({str(tmp_path)!r}); {start}"
    assert python(tmp_path, "-c", code).stdout == f"slotline {slotline.__version__}\n"
