"""Triton's launchers are compiled by any C compiler that Baton finds."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from baton_engine.ops.choice import PYTHON_HEADERS, prepare_launchers
from baton_engine.ops.native.library import COMPILERS

triton = pytest.importorskip("triton")

SOURCE = """
#include <Python.h>
#include <math.h>
#include "answer.h"

static PyObject *root(PyObject *self, PyObject *number) {
  return PyFloat_FromDouble(sqrt(PyFloat_AsDouble(number)) + ANSWER);
}
static PyMethodDef methods[] = {{"root", root, METH_O, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the tests' changes of Triton's settings."""
    monkeypatch.setattr(triton.knobs.build, "impl", None)


def folder_with(folder: Path, *programs: str) -> str:
    """Return `folder` with these names of the C compiler."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None or not (PYTHON_HEADERS / "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of Python")
    for program in programs:
        (folder / program).symlink_to(compiler)
    return str(folder)


def test_launchers_need_the_headers_of_python(tmp_path: Path) -> None:
    assert "has no Python.h" in prepare_launchers(dict(os.environ), tmp_path)


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="ziglang has a compiler")
def test_launchers_without_a_compiler_say_what_to_install(tmp_path: Path) -> None:
    reason = prepare_launchers({"PATH": folder_with(tmp_path)})
    assert reason.startswith("Triton compiles its launchers, but no C compiler is installed")


@pytest.mark.parametrize("program", ["gcc", "clang"])
def test_launchers_are_left_to_a_compiler_that_triton_finds(program: str, tmp_path: Path) -> None:
    assert prepare_launchers({"PATH": folder_with(tmp_path, program)}) == ""
    assert triton.knobs.build.impl is None


def test_launchers_are_compiled_where_triton_finds_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image of workers, where the command is that of `ziglang`."""
    from triton.runtime.build import compile_module_from_file

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert prepare_launchers({"PATH": folder_with(tmp_path, "cc")}) == ""
    source, wrong = tmp_path / "launcher.c", tmp_path / "wrong.c"
    source.write_text(SOURCE)
    (tmp_path / "answer.h").write_text("#define ANSWER 39\n")
    built = compile_module_from_file(
        str(source),
        "launcher",
        library_dirs=["/usr/lib"],
        include_dirs=[str(tmp_path)],
        libraries=["libm.so.6"],
    )
    assert built.root(9.0) == 42
    wrong.write_text("nothing of C")
    with pytest.raises(RuntimeError, match="wrong cannot be compiled"):
        compile_module_from_file(str(wrong), "wrong")
