"""Who may import what, read from the source of every module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "webapi", "worker", "slotline")

#: Modules of the worker that hold ctypes; `worker/backend.py` is the protocol they stand behind.
NATIVE = ("worker/llama_",)
#: These also need llama_cpp, but only once they are called.
NATIVE_INSIDE_FUNCTIONS = {"worker/demo.py", "worker/bench.py"}

#: The variables of the command line itself, the environment that child processes start with, and a switch that
#: llama.cpp reads when it is loaded. All settings come through `shared/settings.py`, which reads none by hand.
READS_ENVIRONMENT = {
    "slotline/__main__.py",
    "slotline/batch/processes.py",
    "slotline/home.py",
    "slotline/up/processes.py",
    "worker/llama_native.py",
    "worker/main.py",
}

#: What `pip install slotline` brings along for the client, and the modules that run only with the rest installed.
CLIENT_NEEDS = {"httpx", "click", "rich"}
SERVER_SIDE = ("slotline/up/",)

UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


@dataclass(frozen=True)
class Import:
    """One import: where it stands, what it names, whether it waits for a call, whether it is for type checkers."""

    file: str
    line: int
    module: str
    in_function: bool
    for_typing: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(tree: ast.AST, file: str, in_function: bool = False, for_typing: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, in_function, for_typing)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(file, node.lineno, f"{_base(node, file)}.{alias.name}", in_function, for_typing)
        elif isinstance(node, ast.Call) and (name := _imported_by_name(node)):
            yield Import(file, node.lineno, name, in_function, for_typing)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = for_typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        yield from imports_of(node, file, inside, typing)


def _base(node: ast.ImportFrom, file: str) -> str:
    """The absolute name of what `from … import` names, relative or not."""
    package = Path(file).parent.parts
    parts = [*package[: len(package) - node.level + 1], node.module] if node.level else [node.module]
    return ".".join(part for part in parts if part)


def _imported_by_name(call: ast.Call) -> str | None:
    """`import_module("x")` and `__import__("x")`; a name that is only known when it runs cannot be told."""
    function = ast.unparse(call.func)
    if function not in ("import_module", "importlib.import_module", "__import__") or not call.args:
        return None
    argument = call.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


@cache
def trees() -> dict[str, ast.Module]:
    """The source of every module by its path."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def imports() -> list[Import]:
    return [found for file, tree in trees().items() for found in imports_of(tree, file)]


def of(package: str) -> list[Import]:
    return [found for found in imports() if found.file.startswith(f"{package}/")]


def told(found: list[Import]) -> str:
    return "\n".join(map(str, found))


def test_the_source_is_found() -> None:
    assert {file.split("/")[0] for file in trees()} == set(PACKAGES)
    assert len(imports()) > 100


@pytest.mark.parametrize(
    ("code", "module", "in_function", "for_typing"),
    [
        ("import a.b as c", "a.b", False, False),
        ("from a.b import c", "a.b.c", False, False),
        ("from . import c", "worker.sub.c", False, False),
        ("from ..b import c", "worker.b.c", False, False),
        ("try:\n    import a\nexcept ImportError:\n    pass", "a", False, False),
        ("def f():\n    if 1:\n        import a", "a", True, False),
        ("class A:\n    async def f(self):\n        from a import b", "a.b", True, False),
        ("class A:\n    import a", "a", False, False),
        ("if TYPE_CHECKING:\n    import a", "a", False, True),
        ("x = import_module('a.b')", "a.b", False, False),
        ("f = lambda: __import__('a')", "a", True, False),
    ],
)
def test_an_import_is_seen_wherever_it_stands(code: str, module: str, in_function: bool, for_typing: bool) -> None:
    (found,) = imports_of(ast.parse(code), "worker/sub/x.py")
    assert (found.module, found.in_function, found.for_typing) == (module, in_function, for_typing)


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("shared", {"webapi", "worker", "slotline", "flask", "flask_openapi", "gunicorn", "gevent", "llama_cpp"}),
        ("webapi", {"worker", "slotline", "llama_cpp", "numpy", "ctypes", "blinker"}),
        ("worker", {"webapi", "slotline", "flask", "flask_openapi", "werkzeug", "gunicorn", "gevent"}),
    ],
)
def test_no_package_imports_what_belongs_to_another_side(package: str, never: set[str]) -> None:
    wrong = [found for found in of(package) if found.top in never]
    assert not wrong, told(wrong)


def test_the_client_imports_the_other_packages_only_inside_functions() -> None:
    loaded = [found for found in of("slotline") if not found.in_function and not found.for_typing]
    wrong = [found for found in loaded if found.top in ("shared", "webapi", "worker")]
    assert not wrong, told(wrong)


def test_the_client_works_with_three_libraries_alone() -> None:
    allowed = CLIENT_NEEDS | {"slotline"} | set(sys.stdlib_module_names)
    loaded = [found for found in of("slotline") if not found.in_function and not found.for_typing]
    wrong = [found for found in loaded if found.top not in allowed and not found.file.startswith(SERVER_SIDE)]
    assert not wrong, told(wrong)
    starts = [found for found in loaded if found.module.startswith("slotline.up")]
    wrong = [found for found in starts if not found.file.startswith(SERVER_SIDE)]
    assert not wrong, told(wrong)


def test_only_the_llama_modules_touch_ctypes_and_llama_cpp() -> None:
    wrong = [
        found
        for found in imports()
        if found.top in ("ctypes", "llama_cpp")
        and not found.file.startswith(NATIVE)
        and not (found.file in NATIVE_INSIDE_FUNCTIONS and found.in_function and found.top == "llama_cpp")
    ]
    assert not wrong, told(wrong)


def loaded_with(module: str) -> set[str]:
    """Files of ours that importing a module runs, itself included."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        path = ahead.pop().replace(".", "/")
        file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in trees()), None)
        if file is None and "/" in path:  # a name in a module
            ahead.append(path.rpartition("/")[0].replace("/", "."))
        elif file is not None and file not in found:
            found.add(file)
            at_once = [i for i in imports() if i.file == file and not i.in_function and not i.for_typing]
            ahead += [i.module for i in at_once]
    return found


@pytest.mark.parametrize("module", ["worker.main", "worker.model_process", "worker.slot_worker", "worker.fake_backend"])
def test_the_worker_starts_without_llama_cpp(module: str) -> None:
    """So that `fake:echo` runs where it is not installed, and a bad setting is told before it is loaded."""
    loaded = loaded_with(module)
    assert "worker/backend.py" in loaded or module == "worker.main"
    assert not [file for file in loaded if file.startswith(NATIVE)]


@pytest.mark.parametrize("file", ["engine", "slots", "batching", "prefix_cache", "requests", "text", "token_choice"])
def test_what_a_tick_is_made_of_knows_neither_redis_nor_rq(file: str) -> None:
    never = ("redis", "rq", "shared.jobs", "shared.stream", "shared.connection", "shared.registry", "shared.ask")
    found_in = [found for found in imports() if found.file == f"worker/{file}.py"]
    wrong = [found for found in found_in if f"{found.module}.".startswith(tuple(f"{name}." for name in never))]
    assert f"worker/{file}.py" in trees()
    assert not wrong, told(wrong)


def test_nobody_imports_pickle_or_its_like() -> None:
    wrong = [found for found in imports() if found.top in UNSAFE or "Pickle" in found.module]
    assert not wrong, told(wrong)


def test_every_rq_object_with_a_serializer_is_told_ours() -> None:
    """Left out, RQ takes pickle."""
    takes = {"Job.fetch", "Job.create", "Job.fetch_many", "Queue", "RQScheduler", "CanceledJobRegistry", "Job"}
    wrong = [
        f"{file}:{node.lineno} {ast.unparse(node)[:80]}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in takes
        # `.key` alone reads no job.
        and not any(k.arg == "serializer" for k in node.keywords)
        and any(k.arg == "connection" for k in node.keywords)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_only_where_settings_and_child_processes_begin() -> None:
    readers = {
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and "env" in ast.unparse(node))
    }
    assert readers == READS_ENVIRONMENT


def test_no_module_is_called_a_heap_of_helpers() -> None:
    heaps = {"utils", "helpers", "common", "misc", "util"}
    assert not [file for file in trees() if Path(file).stem in heaps]
