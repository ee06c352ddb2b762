"""What an installer is given: the sdist and a wheel of this machine, built from nothing but what the sdist holds.

The wheels of every libc and architecture are built and run by `make wheels wheels-test` (tests/wheels).
"""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

from infini_run.version import VERSION
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.skipif("TEST_PYTHON" in os.environ, reason="a sanitizer's build is no package")
PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
# What runs from an unpacked sdist, with the wheel that was built from it.
SMOKE = ["tests/launch/test_exit_code.py", "tests/unit/options/test_grammar.py"]


def slow_group(name):
    """A decorator of tests that share what they are given. Each group makes its own, side by side with the others."""
    return lambda test: pytest.mark.slow(pytest.mark.xdist_group(f"{__name__}.{name}")(test))


with_wheel, with_sdist = slow_group("wheel"), slow_group("sdist")


FAST = {"IRUN_CFLAGS": "-O0"}  # a compiler that optimizes takes twice as long
FREE_THREADED = "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"


def call(*words, **kwargs):
    return subprocess.run(
        [*map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, timeout=4 * LIMIT_S, **kwargs,
    )  # fmt: skip


def build(what, tree, folder, before="", **environ):
    """By the hooks of PEP 517, in this environment; the name of what was built."""
    code = f"{before}\nfrom setuptools import build_meta\nprint(build_meta.build_{what}({str(folder)!r}))"
    done = call(sys.executable, "-c", code, cwd=tree, env=os.environ | FAST | environ)
    assert done.returncode == 0, done.stdout
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    tracked = call("git", "ls-files", "-z", cwd=ROOT)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    return build("sdist", folder / "tree", folder)


def unpack(sdist, folder):
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    (tree,) = (path for path in folder.iterdir() if path.is_dir())
    return tree


@pytest.fixture(scope="module")
def tree(sdist, tmp_path_factory):
    return unpack(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def text_of(wheel, name):
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


@with_wheel
def test_one_wheel_is_for_every_python_from_3_10_on(wheel):
    assert re.fullmatch(rf"infini_run-{VERSION}-cp310-abi3-linux_{platform.machine()}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = f"infini_run-{VERSION}.data"
    assert {"infini_run/_irun.abi3.so", "infini_run/irun-guard", "infini_run/py.typed"} <= names
    scripts = [f"{data}/scripts/{name}{end}" for name in ("infini-run", "infini-job") for end in ("", ".py")]
    assert {*scripts, f"{data}/data/share/man/man1/infini-run.1"} <= names
    assert not [name for name in names if name.startswith(("tests/", "csrc/")) or name.endswith((".c", ".h"))]


@with_sdist
def test_a_free_threaded_python_has_a_wheel_of_its_own(tree, tmp_path):
    """PEP 703: it has no limited API. What this Python says of itself is changed, and nothing else."""
    shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    wheel = build("wheel", tmp_path / "tree", tmp_path, before=FREE_THREADED)
    assert f"-{PYTHON}-{PYTHON}-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert f"infini_run/_irun{sysconfig.get_config_var('EXT_SUFFIX')}" in archive.namelist()


@with_wheel
def test_the_metadata_is_in_todays_form(wheel):
    """PEP 639 and the well-known labels of project URLs."""
    metadata = email.message_from_string(text_of(wheel, "METADATA"))
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License ::")]
    labels = {line.partition(",")[0] for line in metadata.get_all("Project-URL")}
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= labels
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_every_file_names_the_same_version():
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.skipif(shutil.which("ldd") is None, reason="auditwheel asks the libc of this machine")
@with_wheel
def test_auditwheel_finds_no_library_that_a_wheel_may_not_need(wheel):
    done = call(sys.executable, "-m", "auditwheel", "show", wheel)
    assert done.returncode == 0, done.stdout
    assert re.search(rf'platform tag:\s+"(many|musl)linux_\d+_\d+_{platform.machine()}"', done.stdout), done.stdout


@with_wheel
def test_the_sdist_has_what_its_tests_need_and_they_run_with_its_wheel(tree, wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    # pytest and what we need are this environment's: of a folder that a .pth file names the .pth files are not read
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    flags = ["--no-deps", "--no-index", "--no-compile", "--ignore-installed", "-q"]
    done = call(sys.executable, "-m", "pip", "--python", python, "install", *flags, wheel)
    assert done.returncode == 0, done.stdout
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    done = call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE, cwd=tree, env=env)
    assert done.returncode == 0, done.stdout
    done = call(environment / "bin" / "infini-run", "--version", cwd=tmp_path)
    assert done.stdout == f"infini-run {VERSION}\n"


@pytest.mark.parametrize(
    ("compiler", "missing"),
    [("no-such-compiler", r"a C compiler \(no-such-compiler\)"), ("cc -nostdinc", "the header stdio.h")],
)
@with_sdist
def test_one_line_says_what_is_missing_and_names_the_wheel(sdist, tmp_path, compiler, missing):
    words = ["install", "--no-build-isolation", "--no-deps", "--no-index", f"--target={tmp_path}", sdist]
    done = call(sys.executable, "-m", "pip", *words, env=os.environ | {"CC": compiler})
    assert done.returncode == 1
    (line,) = (line.strip() for line in done.stdout.splitlines() if "infini-run: to build it" in line)
    end = (
        rf"infini_run-{VERSION}-cp310-abi3-(many|musl)linux_\d_\d+_{platform.machine()}\.whl, which needs none of it"
    )
    assert re.fullmatch(
        rf"infini-run: to build it, {missing} is missing: install it \(.+\), or install the wheel {end}", line
    )
    assert "Traceback" not in done.stdout


@with_sdist
def test_a_free_threaded_python_without_a_compiler_gets_no_name_of_a_wheel(tree, tmp_path):
    """No wheel of ours fits it."""
    code = f"{FREE_THREADED}\nfrom setuptools import build_meta\nbuild_meta.build_wheel({str(tmp_path)!r})"
    done = call(sys.executable, "-c", code, cwd=tree, env=os.environ | {"CC": "no-such-compiler"})
    assert done.returncode == 1
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"infini-run: to build it, a C compiler \(no-such-compiler\) is missing: install it \([^()]+\)", line
    )


def test_every_package_of_the_source_is_installed():
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("infini_run/**/__init__.py")}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == {folder.replace("/", ".") for folder in folders}
