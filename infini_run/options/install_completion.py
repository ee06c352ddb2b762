"""`--completion=install`: the scripts of the user's shells, written to where each shell looks for them.

bash-completion and fish search folders of the user (XDG base directories). zsh searches its `fpath` alone, so the
output says what its user has to add. The scripts are the only files that this writes.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError, printable
from infini_run.system.secure_files import write_atomic
from infini_run.system.shell import find_program, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh", "fish")
_BASH_COMPLETION = (
    "share/bash-completion/bash_completion",  # since 1.90
    "etc/profile.d/bash_completion.sh",
    "etc/bash_completion",
)


def install_completion(
    command: str, script: Callable[[str], str], environ: Mapping[str, str], root: str = ""
) -> tuple[list[str], int]:
    """Write a command's script for each of the user's shells: those on PATH, and SHELL.

    Args:
        command: infini-run or infini-job.
        script: returns the script for a shell.
        environ: HOME, PATH, SHELL and the variables of the XDG base directories.
        root: a prefix for the folders of the system.

    Returns:
        A line per file, and the exit code: 1 if one is not writable.

    Raises:
        UsageError: there is no shell that has a script, or no home directory.
    """
    shells = [shell for shell in SHELLS if _is_used(shell, environ)]
    if not shells:
        raise UsageError(
            "--completion=install: missing bash, zsh, and fish on PATH; use --completion=bash to print a script"
        )
    lines, code = [], 0
    for shell in shells:
        path = completion_path(shell, command, environ)
        problem = _missing_home(path, environ) or _write(path, script(shell))
        if problem:
            lines.append(f"{shell}: {printable(path)} cannot be written: {problem}")
            code = 1
            continue
        more = _further_step(shell, path, environ, root)
        lines.append(f"{shell}: wrote {printable(path)}" + (f"; {printable(more)}" if more else ""))
    return lines, code


def completion_path(shell: str, command: str, environ: Mapping[str, str]) -> str:
    """Return where `shell` looks for the user's script of `command`. Raises UsageError: there is no home directory.

    Source: bash-completion's README (BASH_COMPLETION_USER_DIR), fish's complete(1), the XDG Base Directory
    Specification, which has relative paths ignored.
    """
    data = _folder("XDG_DATA_HOME", ".local/share", environ)
    if shell == "bash":
        own = environ.get("BASH_COMPLETION_USER_DIR", "").split(":")[0]
        return f"{own if own.startswith('/') else f'{data}/bash-completion'}/completions/{command}"
    if shell == "zsh":
        return f"{data}/zsh/site-functions/_{command}"
    return f"{_folder('XDG_CONFIG_HOME', '.config', environ)}/fish/completions/{command}.fish"


def _folder(variable: str, usual: str, environ: Mapping[str, str]) -> str:
    given = environ.get(variable, "")
    return given if given.startswith("/") else f"{_home(environ)}/{usual}"


def _home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    if not home.startswith("/"):
        raise UsageError(
            "--completion=install: needs the path of a folder in HOME; set it, or use --completion=bash to print a "
            "script"
        )
    return home.rstrip("/")


def _missing_home(path: str, environ: Mapping[str, str]) -> str:
    """Return why this makes nothing at `path`: it is in a home directory that does not exist; else empty."""
    home = (environ.get("HOME") or os.path.expanduser("~")).rstrip("/")
    is_missing = path.startswith(f"{home}/") and not os.path.isdir(home or "/")
    return f"missing home directory {printable(home)}; set HOME" if is_missing else ""


def _is_used(shell: str, environ: Mapping[str, str]) -> bool:
    is_login = os.path.basename(environ.get("SHELL", "")) == shell
    return is_login or bool(find_program(shell, environ.get("PATH", os.defpath)))


def _write(path: str, text: str) -> str:
    """Return why the file is not writable, or empty after a success. A link to a file elsewhere stays one."""
    path = os.path.realpath(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        return str(error.strerror)
    return ""


def _further_step(shell: str, path: str, environ: Mapping[str, str], root: str) -> str:
    """Return what else the user has to do before the shell reads it; empty: nothing."""
    if shell == "zsh":
        text = _read(f"{environ.get('ZDOTDIR') or _home(environ)}/.zshrc")
        folder = os.path.dirname(path)
        if folder in text:
            return ""
        line = f"fpath=({quoted(folder)} $fpath)"
        if "compinit" in text or "oh-my-zsh" in text:
            return f"add to ~/.zshrc, before compinit: {line}"
        return f"add to ~/.zshrc: {line}; autoload -U compinit; compinit"
    folders = ("usr", "usr/local", "opt/homebrew", "")
    has_loader = any(os.path.exists(f"{root}/{folder}/{file}") for folder in folders for file in _BASH_COMPLETION)
    if shell == "bash" and not has_loader and path not in _read(f"{_home(environ)}/.bashrc"):
        return f"bash-completion is missing; add to ~/.bashrc: source {quoted(path)}"
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
