"""What is compiled keeps to what the compiler does right (ARCHITECTURE.md, "Compiled").

`make test-compiled` shows what a module does once it is compiled; here is what none may have, at no cost.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from helpers import HANG_S

import hetlb

ROOT = Path(__file__).parents[1]


def compiled_patterns() -> tuple[str, ...]:
    """`COMPILED` of the hook, which imports what is there at build time alone."""
    tree = ast.parse((ROOT / "hatch_build.py").read_text())
    [wanted] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    ]
    patterns = eval(compile(ast.Expression(wanted), "hatch_build.py", "eval"), {})  # literals and one loop
    assert all(isinstance(pattern, str) for pattern in patterns)
    return tuple(patterns)


MODULES = sorted({path for pattern in compiled_patterns() for path in (ROOT / "hetlb").glob(pattern)})


def test_every_module_that_is_named_is_there() -> None:
    for pattern in compiled_patterns():
        assert list((ROOT / "hetlb").glob(pattern)), pattern


def found(unwanted: Callable[[ast.Module], Iterator[ast.AST]]) -> list[str]:
    """Return `FILE:LINE: CODE` of every node that no compiled module may have."""
    return [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        for path, module in modules()
        for node in unwanted(module)
    ]


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    """Return every compiled module with its tree."""
    return [(path, ast.parse(path.read_text())) for path in MODULES]


def calls(node: ast.AST | None) -> Iterator[ast.Call]:
    yield from (each for each in ast.walk(node or ast.Pass()) if isinstance(each, ast.Call))


def test_no_class_is_read_by_its_annotations() -> None:
    def structs(module: ast.Module) -> Iterator[ast.AST]:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                yield from (base for base in node.bases if "Struct" in ast.unparse(base))

    assert found(structs) == []


def test_no_constructor_hands_on_whatever_it_was_given() -> None:
    def handed_on(module: ast.Module) -> Iterator[ast.AST]:
        for call in calls(module):
            if ast.unparse(call.func) == "super().__init__":
                yield from (each for each in call.args if isinstance(each, ast.Starred))
                yield from (each.value for each in call.keywords if each.arg is None)

    assert found(handed_on) == []


def test_a_bound_of_a_slice_calls_nothing_that_could_happen_twice() -> None:
    def called(module: ast.Module) -> Iterator[ast.AST]:
        for node in ast.walk(module):
            if isinstance(node, ast.Slice):
                for bound in (node.lower, node.upper, node.step):
                    yield from (
                        call for call in calls(bound) if ast.unparse(call.func) not in ("len", "min", "max")
                    )

    assert found(called) == []


def test_a_constant_is_final() -> None:
    def assigned(module: ast.Module) -> Iterator[ast.AST]:
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                yield from [node] if isinstance(node.value.value, int | float) else []

    assert found(assigned) == []


# --- packages ----------------------------------------------------------------------------------------------


def hatchling(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )


def test_without_a_c_compiler_the_build_ends_with_one_line(tmp_path: Path) -> None:
    done = hatchling("-t", "wheel", "-d", str(tmp_path), HETLB_COMPILE="1", CC="/none/cc")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "expected a C compiler (/none/cc), found none" in line
    assert not list(tmp_path.iterdir())


def test_an_unknown_level_of_optimisation_ends_the_build_with_one_line(tmp_path: Path) -> None:
    done = hatchling("-t", "wheel", "-d", str(tmp_path), HETLB_COMPILE="1", HETLB_COMPILE_LEVEL="fast")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "HETLB_COMPILE_LEVEL: expected one of 0, 1, 2, 3, s, got 'fast'" in line
    assert not list(tmp_path.iterdir())


def test_the_pure_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    done = hatchling("-t", "wheel", "-d", str(tmp_path), HETLB_COMPILE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"hetlb-{hetlb.__version__}-py3-none-any.whl"
    found = zipfile.ZipFile(wheel).namelist()
    assert f"hetlb-{hetlb.__version__}.data/data/share/man/man1/hetlb.1" in found
    names = {name for name in found if not name.startswith("hetlb-")}
    assert names >= {str(path.relative_to(ROOT)) for path in (ROOT / "hetlb").rglob("*.py")}
    assert all(name.startswith("hetlb/") for name in names)


def test_the_source_package_holds_no_recordings_and_no_pictures(tmp_path: Path) -> None:
    done = hatchling("-t", "sdist", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "LICENSE", "README.md", "hetlb/cli/main.py"} <= names
    assert not any(name.startswith(("tests/", "bench/", "profiling/")) for name in names)
    assert not any(name.endswith((".png", ".html", ".http")) for name in names if name.startswith("docs/"))
