"""The first process builds the native library; without a compiler torch serves, and a log line reports it."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton_api import installing
from baton_engine.model.decoder import Decoder, create_model
from baton_engine.model.native_decoder import native_decoder
from baton_engine.ops.native import library
from tests.engine.random_weights import random_weights, tiny_spec
from tests.engine.test_interruption import until

CPU = torch.device("cpu")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A machine with a compiler and an empty cache."""
    if not any(shutil.which(name) for name in library.COMPILERS):
        pytest.skip(f"no C compiler on PATH: none of {', '.join(library.COMPILERS)}")
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "BATON_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def quick(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The same, where the compiler's result is the library that this machine has: compiling takes 15 s."""
    library_here = library.load(os.environ)._name
    return environment | {
        "CC": compiler_script(tmp_path / "quick-cc", f'cp {library_here} "$out"', environment)
    }


def compiler_script(path: Path, command: str, environment: dict[str, str]) -> str:
    """A compiler that runs `command` with its result's path in `$out`, and else answers as the real one."""
    real = library.find_compiler(environment)[0]
    path.write_text(
        f"#!/bin/sh\nreal={real}\nlast= out=\n"
        'for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done\n'
        f'[ "$out" ] || exec $real "$@"\n{command}\n'
    )
    path.chmod(0o755)
    return str(path)


def built(environment: dict[str, str]) -> list[str]:
    return sorted(entry.name for entry in Path(environment["BATON_CACHE"]).iterdir())


def test_library_parallel_starts_build_it_once(quick: dict[str, str], tmp_path: Path) -> None:
    """One begins before torch is imported. The compiler is slow, and a later start compiles nothing."""
    copy = Path(quick["CC"]).read_text().splitlines()[-1]
    quick["CC"] = compiler_script(tmp_path / "cc", f'echo "$@" >> {tmp_path}/calls; sleep 1; {copy}', quick)
    builder = library.begin_build(quick)
    assert builder is not None
    with ThreadPoolExecutor(3) as pool:
        for loaded in pool.map(library.load, [quick] * 3):
            assert loaded.baton_create
    assert builder.wait() == 0
    assert library.begin_build(quick) is None
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("decoder.c" in call for call in calls) == 1
    assert len(built(quick)) == 1


def test_library_is_built_after_a_builder_was_killed(quick: dict[str, str], tmp_path: Path) -> None:
    endless = compiler_script(tmp_path / "cc", f"touch {tmp_path}/begun; exec sleep 5", quick)
    builder = library.begin_build({**quick, "CC": endless})
    assert builder is not None
    until((tmp_path / "begun").exists)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(library.load, quick)
        builder.kill()
        builder.wait()
        assert loading.result().baton_create


def test_library_that_cannot_be_built_is_not_begun(environment: dict[str, str]) -> None:
    assert library.begin_build(environment | {"CC": "no-such-compiler"}) is None
    assert library.begin_build(environment | {"BATON_KERNELS": "off"}) is None
    assert library.begin_build(environment | {"BATON_BUNDLED": "/bundled"}) is None


def test_another_compiler_makes_another_file(quick: dict[str, str], tmp_path: Path) -> None:
    library.load(quick)
    other = tmp_path / "other-cc"
    other.symlink_to(quick["CC"])
    library.load({**quick, "CC": str(other)})
    assert len(built(quick)) == 2


def test_without_a_compiler_the_message_names_the_way_out(tmp_path: Path) -> None:
    try:
        command = library.find_compiler({"PATH": str(tmp_path)})
    except library.Unavailable as reason:
        assert installing.command("kernels") in str(reason)
    else:
        assert command == [sys.executable, "-m", "ziglang", "cc"]  # the wheel is its own way out


def test_torch_serves_without_the_library_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec()
    weights = random_weights(spec, torch.float32)
    environment = {"PATH": str(tmp_path), "CC": "no-such-compiler", "HOME": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert native_decoder(spec, weights, torch.float32, environment) is None
    (line,) = caplog.messages
    assert "no-such-compiler" in line and "torch" in line
    assert isinstance(create_model(spec, weights, CPU, torch.float32, environment), Decoder)


def test_library_failing_compiler_is_quoted(environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "out of registers" >&2; exit 1; }\n')
    broken.chmod(0o755)
    with pytest.raises(library.Unavailable, match="out of registers"):
        library.load({**environment, "CC": str(broken)})
    assert built(environment) == []


@pytest.mark.slow
def test_library_that_fails_its_own_test_is_discarded(environment: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.h"
    wrong.write_text(
        '#define baton_sound baton_unused\n__attribute__((visibility("default"))) int unsound;\n'
    )
    unoptimized = f'exec $real -include {wrong} "$@" -O0'
    environment["CC"] = compiler_script(tmp_path / "wrong-cc", unoptimized, environment)
    with pytest.raises(library.Unavailable, match="wrong results"):
        library.load(environment)
    assert built(environment) == []


def test_library_unwritable_cache_names_the_variable(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(library.Unavailable, match="BATON_CACHE"):
        library.load({**environment, "BATON_CACHE": str(tmp_path / "file" / "cache")})


def test_library_of_another_user_is_not_loaded(
    quick: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a home directory the cache's name is known to all: a library planted there must not run."""
    if os.getuid():
        pytest.skip("only root can give a file to another user")
    library.load(quick)
    (planted,) = Path(quick["BATON_CACHE"]).iterdir()
    planted.unlink()  # this process has mapped it: truncated, it would end the process at its exit
    planted.write_bytes(b"not a library")
    os.chown(planted, 12345, -1)
    with caplog.at_level(logging.WARNING):
        assert library.load(quick).baton_create
    assert str(planted) in caplog.text
    assert planted.read_bytes() == b"not a library"
    planted.unlink()
    os.chown(planted.parent, 12345, -1)
    assert library.load(quick).baton_create
    assert built(quick) == []


@pytest.mark.slow
def test_kernels_compile_without_warnings(environment: dict[str, str], tmp_path: Path) -> None:
    """For this processor and for each kind that images bring libraries for."""
    compiler = library.find_compiler(environment)
    strict = ("-O1", "-Wall", "-Wextra", "-Werror")
    kinds: list[tuple[str, ...]] = [(library.NATIVE_FLAG,)]
    if platform.machine() in ("x86_64", "AMD64") and "ziglang" not in compiler:
        kinds += [target.flags for target in library.TARGETS]
    for number, flags in enumerate(kinds):
        others = (flag for flag in library.FLAGS if flag != library.NATIVE_FLAG)
        library.compile_to(tmp_path / f"{number}.so", compiler, (*flags, *others, *strict), environment)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_run_clean_under_sanitizers(
    environment: dict[str, str], tmp_path: Path, sanitizers: str
) -> None:
    """One thread and four give equal bits, without a bad access, an undefined operation or a race."""
    compiler = library.find_compiler(environment)
    driver, program = Path(__file__).with_name("kernels_driver.c"), tmp_path / "driver"
    flags = [flag for flag in library.FLAGS if flag not in ("-shared", "-fno-sanitize=undefined")]
    flags += ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    linked = subprocess.run([*compiler, *flags, probe, "-o", program], capture_output=True, check=False)
    if linked.returncode or subprocess.run([program], capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler} has no runtime for -fsanitize={sanitizers} here")
    sources = ["-I", str(Path(library.__file__).parent), str(driver), "-lm"]
    subprocess.run([*compiler, *flags, *sources, "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+bf16"])
def test_kernels_run_on_an_emulated_arm(tmp_path: Path, march: str) -> None:
    """Without and with Arm's own bfloat16 products, four lanes to a vector."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("no aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    others = [f for f in library.FLAGS if f not in ("-shared", "-fPIC", library.NATIVE_FLAG)]
    few = "-DRANDOM_BATCHES=1"  # emulated, all of them take minutes
    flags = [f"-march={march}", *others, few, "-O2", "-Wall", "-Wextra", "-Werror", "-static"]
    driver, program = Path(__file__).with_name("kernels_driver.c"), tmp_path / "driver"
    sources = ["-I", str(Path(library.__file__).parent), str(driver), "-lm"]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    ran = subprocess.run([emulator, "-cpu", "max", str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]


def test_library_kernels_off_is_unavailable(environment: dict[str, str]) -> None:
    with pytest.raises(library.Unavailable, match="BATON_KERNELS"):
        library.load({**environment, "BATON_KERNELS": "off"})


BASIC = frozenset({"sse", "sse2"})


@pytest.mark.parametrize(
    ("instructions", "names"),
    [
        pytest.param(BASIC, [], id="an old one"),
        pytest.param(BASIC | library.V3, ["avx2"], id="AVX2"),
        pytest.param(BASIC | library.V4, ["avx512", "avx2"], id="AVX-512"),
        pytest.param(BASIC | library.BF16, ["avx512-bf16", "avx512-vnni", "avx512", "avx2"], id="bfloat16"),
        pytest.param(
            BASIC | library.BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
            ["amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2"],
            id="AMX",
        ),
        pytest.param(
            BASIC | library.BF16 | {"amx_tile", "amx_bf16"},
            ["avx512-bf16", "avx512-vnni", "avx512", "avx2"],
            id="AMX without 8 bits",
        ),
        pytest.param(BASIC | library.VNNI, ["avx512-vnni", "avx512", "avx2"], id="VNNI"),
        pytest.param(BASIC | library.V3 | {"avx_vnni"}, ["avx-vnni", "avx2"], id="VNNI without AVX-512"),
        pytest.param(BASIC | library.V3 | {"amx_tile", "amx_bf16"}, ["avx2"], id="AMX without the rest"),
        pytest.param(frozenset(), [], id="nobody says"),
    ],
)
def test_bundled_libraries_match_the_processors_instructions(
    tmp_path: Path, instructions: frozenset[str], names: list[str]
) -> None:
    for target in library.TARGETS:
        (tmp_path / target.file).write_bytes(b"")
    (tmp_path / "kernels-avx2-of-other-sources.so").write_bytes(b"")
    offered = [path.name for path in library.bundled(tmp_path, instructions)]
    assert offered == [target.file for name in names for target in library.TARGETS if target.name == name]


@pytest.mark.slow
def test_library_bundled_file_is_used_without_compiling(environment: dict[str, str], tmp_path: Path) -> None:
    (avx2,) = [target for target in library.TARGETS if target.name == "avx2"]
    if not avx2.instructions <= library.instructions():
        pytest.skip("the processor has no AVX2")
    folder = tmp_path / "bundled"
    library.build(folder, [avx2])
    (folder / library.TARGETS[0].file).write_bytes(b"no library at all")
    bundled_only = {"PATH": "", "CC": "no-such-compiler", "BATON_BUNDLED": str(folder)}
    assert library.load(bundled_only).baton_create
    (folder / avx2.file).unlink()
    with pytest.raises(library.Unavailable, match="no-such-compiler"):
        library.load(bundled_only)
