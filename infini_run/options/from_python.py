"""Values of the Python API become the words of the command line: one parser, one check, one message for both."""

from __future__ import annotations

import os

from infini_run.errors import UsageError, printable
from infini_run.options.keyword_errors import COMMAND_ONLY, KeywordErrors
from infini_run.options.options import complete_programs, resolve, resolve_flags
from infini_run.options.python_values import check_environment as check_environment
from infini_run.options.python_values import check_path as check_path
from infini_run.options.python_values import check_words as check_words
from infini_run.options.python_values import flag_words
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType
    from typing import Any

    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.options.launch_options import Options
    from infini_run.options.options import Request

_FOR_FLAGS = ("INFINI_RUN_", "PET_", "TORCH_ELASTIC_")
_OF_SUBPROCESS = ("capture_output", "stdout", "stderr", "text", "universal_newlines")  # they ask for output as text


def check_names(
    owner: str, flags: Mapping[str, object], table: Mapping[str, object], function: Callable[..., object]
) -> None:
    """Check that each keyword is a flag.

    Args:
        owner: the called function or class, for the message.
        flags: the keywords.
        table: the flags that there are, by name.
        function: the called function, as the user may have meant its own keywords, too.

    Raises:
        TypeError: one is not, as Python itself says it.
    """
    for name in flags:
        if name not in table and name != "nproc":
            from infini_run.options.hints import of_keyword

            code: CodeType = function.__code__
            own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            near = of_keyword(name, [*(word for word in own if word != "self"), *table])
            hint = f"; did you mean {near}?" if near else ""
            if name in _OF_SUBPROCESS:
                hint = "; use log_dir=DIR, and read DIR/rank_N.log"
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")


def make_environment(env: Mapping[str, str] | None, inherit_env: bool) -> dict[str, str]:
    """Return the variables of the ranks: this process's, unless `inherit_env` is false, and `env` over them.

    Raises:
        UsageError: `env` holds what no environment can, see `check_environment`.
    """
    return {**(os.environ if inherit_env else {}), **check_environment(env)}


def prepare_environment(cluster: ClusterEnvironment, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the ranks without those that an MPI launcher set for this process alone.

    Warns of what engine="auto" had to guess, and of a step with CPUs that this process may not use.

    Raises:
        UsageError: Each task of the scheduler's step is one rank already.
    """
    if cluster.is_task:
        raise UsageError(
            f"engine='auto': needs a launcher above the ranks, but with {cluster.source('tasks_per_node')} each "
            "task is one rank; run one task per node, or use engine='local'"
        )
    from warnings import warn

    from infini_run.environments.launcher_variables import strip_launcher_environment

    if cluster.warning:
        warn(f"engine='auto': {printable(cluster.warning)}", RuntimeWarning, stacklevel=3)
    if cluster.engine == "slurm":
        from infini_run.environments.slurm import explain_binding
        from infini_run.system.cgroup import count_own_cpus

        binding = explain_binding(environ, *count_own_cpus())
        if binding:
            warn(binding, RuntimeWarning, stacklevel=3)
    return strip_launcher_environment(environ, options.export)


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the program and its arguments as text. Raises UsageError: they are no list of texts and paths."""
    if isinstance(command, (str, bytes)) or not hasattr(command, "__len__") or not command:
        raise UsageError(f"command={command!r}: expected a list, the program and its arguments")
    return check_words("command", command)


class Program:
    """One program of a job of several, for `run` and `ProcessLauncher`.

    Args:
        command: The program and its arguments.
        name: Its name, such as "trainer".
        env: Variables that are added to the environment of its ranks. None: none.
        cwd: Where its ranks start, and where a relative program is looked for. None: where the job starts.
        nproc_per_node: How many ranks it has.
        gpus_per_proc: How many GPUs each rank sees; 0: all of them.
        omp_num_threads: OMP_NUM_THREADS of its ranks. None: a share of the CPUs.
        module: The first word of the command is a Python module.
        no_python: Execute a file of Python directly.
        distributed_args: Add --distributed-rank=R and --distributed-world-size=W to each rank's arguments.
        on_nodes: The node ranks where it runs, such as [0, 1] or "0-2"; "rest": where no other program is listed.
            None: all nodes.
        after: The names of programs that are ready before this one starts: a name, or a list. None: none.
        ready_port: The program is ready once this port answers; 0: by READY=1.
        log_dir: A folder for the logs of its ranks. None: one with its name in that of the job, if it has one.
        ends_job: Stop the other programs when all ranks of this one exited with code 0.
        max_restarts: With restart_scope="program": how often its ranks restart after a failure. None: as often as
            `max_restarts` of the job.

    Raises:
        UsageError: `command` is no list of texts and paths.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        nproc_per_node: int | str = 1,
        gpus_per_proc: int = 0,
        omp_num_threads: int | str | None = None,
        module: bool = False,
        no_python: bool = False,
        distributed_args: bool = False,
        on_nodes: int | str | Sequence[int] | None = None,
        after: str | Sequence[str] | None = None,
        ready_port: int = 0,
        log_dir: str | os.PathLike[str] | None = None,
        ends_job: bool = False,
        max_restarts: int | None = None,
    ) -> None:
        self.command = check_command(command)
        self.name = name
        self.env = check_environment(env)
        self.cwd = check_path("cwd", cwd)
        self.flags: dict[str, object] = {
            "nproc_per_node": nproc_per_node,
            "gpus_per_proc": gpus_per_proc,
            "omp_num_threads": omp_num_threads,
            "module": module,
            "no_python": no_python,
            "distributed_args": distributed_args,
            "on_nodes": on_nodes,
            "after": after,
            "ready_port": ready_port or None,
            "log_dir": log_dir,
            "ends_job": ends_job,
            "max_restarts": max_restarts,
        }

    def __repr__(self) -> str:
        return f"Program({list(self.command)!r}, name={self.name!r})"


def read_command(command: Sequence[str] | Sequence[Program]) -> tuple[tuple[str, ...], tuple[Program, ...]]:
    """Return the words of one program, and none of several; or no words, and the programs of a job of several.

    Raises:
        UsageError: It is no list of texts and paths, nor one of programs.
    """
    if not isinstance(command, (list, tuple)) or not any(isinstance(each, Program) for each in command):
        words: Any = command
        return check_command(words), ()
    programs = tuple(each for each in command if isinstance(each, Program))
    if len(programs) < len(command):
        raise UsageError(f"command={command!r}: expected words alone, or Program alone")
    return (), programs


def read_flags(
    flags: Mapping[str, object],
    program: tuple[str, ...],
    environ: Mapping[str, str],
    programs: Sequence[Program] = (),
) -> Request:
    """Read the flags of a Python call as the command line would.

    Args:
        flags: The values by name. Lists and dicts become the flag's text.
        program: The program and its arguments.
        environ: The environment. It counts for the variables of an engine, and not for those that stand for a flag.
        programs: The programs of a job of several, in place of `program`.

    Raises:
        UsageError: The request is invalid, or belongs to the command alone.
    """
    errors = KeywordErrors(flags, has_programs=bool(programs))
    flags = {"stdin": "none", **flags}
    if "nproc" in flags:
        alias = flags.pop("nproc")
        flags["nproc_per_node"] = one_of_two(flags.get("nproc_per_node"), alias)[1]
    words = check_words("flags", [word for name, value in flags.items() for word in flag_words(name, value)])
    around = {
        name: value for name, value in environ.items() if name == MARKER_VARIABLE or not name.startswith(_FOR_FLAGS)
    }
    with errors:
        if programs:
            request = _resolve_programs(words, programs, around, flags)
        else:
            request = resolve([*words, "--", *program], around)
        options = request.options
        asked = request.question or next((name for name in COMMAND_ONLY if getattr(options, name)), "")
        if options is None or asked:
            raise UsageError(f"{asked}=: not a keyword of the Python API; use it with the command")
        if request.without_effect and options.engine != "auto":  # where a program finds itself is not its mistake
            raise UsageError(request.without_effect)
    return request


def _resolve_programs(
    words: Sequence[str], programs: Sequence[Program], environ: Mapping[str, str], flags: Mapping[str, object]
) -> Request:
    from infini_run.options.programs import OF_ONE, check_parts, part_of

    for name in flags:
        if name in OF_ONE and name != "max_restarts":
            raise UsageError(f"{name}={flags[name]!r}: cannot hold for one of several programs; give it to a Program")
    job, parts = resolve_flags(words, environ), []
    for each in programs:
        with KeywordErrors(each.flags, has_programs=True):
            parts.append(part_of(each.name, each.command, each.flags, env=each.env, cwd=each.cwd, environ=environ))
    return complete_programs(check_parts(job, parts, "a list of Program"), environ)


def one_of_two(nproc_per_node: object, nproc: object) -> tuple[str, Any]:
    """Return the name under which the caller gave the number of processes, and the number.

    Raises:
        UsageError: The call has both names.
    """
    if nproc is None:
        return "nproc_per_node", nproc_per_node
    if nproc_per_node is not None:
        raise UsageError(
            f"nproc_per_node={nproc_per_node!r} conflicts with nproc={nproc!r}: both are one flag; drop one of them"
        )
    return "nproc", nproc
