"""--completion=install: real shells find what it wrote, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from infini_run.errors import UsageError
from infini_run.options.completion import script
from infini_run.options.install_completion import completion_path, install_completion
from tests.support.cluster import needs
from tests.support.command import COMMAND

SCRIPTS = sysconfig.get_path("scripts")
JOB = Path(SCRIPTS, "infini-job")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.zshrc").write_text("# mine\n")
    return tmp_path / "home"


def environment(home, **more):
    return {"PATH": os.environ["PATH"], "HOME": str(home), **more}


def only(shell, tmp_path):
    """A PATH with one shell, or none."""
    folder = tmp_path / f"only-{shell}"
    folder.mkdir()
    if shell:
        (folder / shell).symlink_to("/bin/true")
    return str(folder)


def install(command, home, path=None, **more):
    environ = environment(home, **more)
    if path is not None:
        environ["PATH"] = path
    return subprocess.run([*command, "--completion", "install"], capture_output=True, text=True, env=environ)


def files(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_it_writes_the_files_of_the_shells_that_are_there_and_nothing_else(home, tmp_path):
    path = only("fish", tmp_path)
    done = install(COMMAND, home, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"fish: wrote {home}/.config/fish/completions/infini-run.fish\n"
    assert files(home) == [".config/fish/completions/infini-run.fish", ".zshrc"]
    assert (home / ".config/fish/completions/infini-run.fish").read_text().rstrip() == script("fish").rstrip()
    done = install(COMMAND, home, path, SHELL="/bin/zsh")  # a login shell elsewhere is one of the user's
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["zsh", "fish"]


def test_infini_job_writes_its_own(home, tmp_path):
    done = install([str(JOB)], home, only("fish", tmp_path))
    assert (done.returncode, done.stdout) == (
        0,
        f"fish: wrote {home}/.config/fish/completions/infini-job.fish\n",
    )
    printed = subprocess.run([str(JOB), "--completion=fish"], capture_output=True, text=True, check=True).stdout
    assert (home / ".config/fish/completions/infini-job.fish").read_text() == printed
    wrong = subprocess.run([str(JOB), "--completion", "tcsh"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "infini-job: --completion tcsh: expected bash, zsh, fish, or install; use --completion=bash\n",
    )


def test_a_second_time_writes_what_is_new_and_leaves_a_link_a_link(home, tmp_path):
    target = home / ".config/fish/completions/infini-run.fish"
    target.parent.mkdir(parents=True)
    (home / "dotfiles.fish").write_text("old\n")
    target.symlink_to(home / "dotfiles.fish")
    assert install(COMMAND, home, only("fish", tmp_path)).returncode == 0
    assert target.is_symlink()
    assert (home / "dotfiles.fish").read_text().rstrip() == script("fish").rstrip()
    assert files(home) == [".config/fish/completions/infini-run.fish", ".zshrc", "dotfiles.fish"]


def test_a_folder_that_cannot_be_written_is_one_line_and_the_other_shells_get_theirs(home, tmp_path):
    (home / ".local").write_text("a file\n")
    lines, code = install_completion(
        "infini-run", script, environment(home, PATH=only("fish", tmp_path), SHELL="bash")
    )
    assert code == 1
    path = f"{home}/.local/share/bash-completion/completions/infini-run"
    assert lines[0] == f"bash: {path} cannot be written: Not a directory"
    assert lines[1] == f"fish: wrote {home}/.config/fish/completions/infini-run.fish"
    done = install(COMMAND, home, only("bash", tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{lines[0]}\n", "")


def test_without_a_shell_or_a_home_it_says_so(home, tmp_path):
    done = install(COMMAND, home, only("", tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "infini-run: --completion=install: missing bash, zsh, and fish on PATH; use --completion=bash to print a "
        "script\n"
    )
    with pytest.raises(UsageError, match="needs the path of a folder in HOME"):
        completion_path("fish", "infini-run", {"HOME": "here"})


def test_the_folders_are_those_of_the_shells_and_xdg():
    home = {"HOME": "/h", "XDG_DATA_HOME": "/d", "XDG_CONFIG_HOME": "/c"}
    assert completion_path("bash", "x", home) == "/d/bash-completion/completions/x"
    assert completion_path("bash", "x", {**home, "BASH_COMPLETION_USER_DIR": "/b:/e"}) == "/b/completions/x"
    assert completion_path("zsh", "x", home) == "/d/zsh/site-functions/_x"
    assert completion_path("fish", "x", home) == "/c/fish/completions/x.fish"
    relative = {"HOME": "/h/", "XDG_DATA_HOME": "d", "XDG_CONFIG_HOME": ""}  # ignored, the specification says
    assert completion_path("bash", "x", relative) == "/h/.local/share/bash-completion/completions/x"
    assert completion_path("fish", "x", relative) == "/h/.config/fish/completions/x.fish"


@needs("fish")
def test_fish_finds_it(home):
    install(COMMAND, home)
    environ = environment(home, PATH=f"{SCRIPTS}:{os.environ['PATH']}")
    line = ["fish", "-c", "complete -C 'infini-run --nnod'"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("--nnodes=\t")


@needs("zsh")
def test_zsh_finds_it_after_what_the_line_says_and_is_not_told_twice(home):
    said = next(line for line in install(COMMAND, home).stdout.splitlines() if line.startswith("zsh:"))
    wrote, _, advice = said.partition("; add to ~/.zshrc: ")
    assert wrote == f"zsh: wrote {home}/.local/share/zsh/site-functions/_infini-run"
    asked = ["zsh", "-i", "-c", "echo $_comps[infini-run]"]
    environ = environment(home)
    assert subprocess.run(asked, env=environ, capture_output=True, text=True).stdout.strip() == ""
    (home / ".zshrc").write_text(f"{advice}\n")
    assert subprocess.run(asked, env=environ, capture_output=True, text=True).stdout.strip() == "_infini-run"
    again = next(line for line in install(COMMAND, home).stdout.splitlines() if line.startswith("zsh:"))
    assert again == wrote
    (home / ".zshrc").write_text("autoload -U compinit; compinit\n")
    told = next(line for line in install(COMMAND, home).stdout.splitlines() if line.startswith("zsh:"))
    assert told == f"{wrote}; add to ~/.zshrc, before compinit: fpath=({home}/.local/share/zsh/site-functions $fpath)"


@needs("bash")
def test_bash_reads_it_by_bash_completion_or_by_the_line_that_it_is_told(home, tmp_path):
    environ = environment(home, PATH=only("bash", tmp_path))
    target = f"{home}/.local/share/bash-completion/completions/infini-run"
    (said,), code = install_completion("infini-run", script, environ, root=str(tmp_path / "bare"))
    assert code == 0
    wrote, _, advice = said.partition("; bash-completion is missing; add to ~/.bashrc: ")
    assert (wrote, advice) == (f"bash: wrote {target}", f"source {target}")
    (home / ".bashrc").write_text(f"{advice}\n")
    done = subprocess.run(
        ["bash", "-i", "-c", "complete -p infini-run"], env=environment(home), capture_output=True, text=True
    )
    assert done.stdout.strip() == "complete -F _infini_run infini-run"
    assert install_completion("infini-run", script, environ, root=str(tmp_path / "bare"))[0] == [wrote]
    (home / ".bashrc").unlink()
    loader = tmp_path / "full/usr/share/bash-completion/bash_completion"
    loader.parent.mkdir(parents=True)
    loader.write_text("")
    assert install_completion("infini-run", script, environ, root=str(tmp_path / "full"))[0] == [wrote]


def test_home_directory_that_is_missing_is_not_made(tmp_path):
    home = tmp_path / "nonexistent"
    environ = environment(home, PATH=only("bash", tmp_path))
    lines, code = install_completion("infini-run", script, environ)
    assert code == 1
    assert lines[0].endswith(f"cannot be written: missing home directory {home}; set HOME")
    assert not home.exists()
