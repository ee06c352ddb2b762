"""What a plan of several programs has beyond that of one: the ranks of each, and what is whose in the environment.

Pure. A plain launch has one program, and doesn't import this.
"""

from __future__ import annotations

from _json import encode_basestring_ascii as quoted  # the C module: `json` takes longer than the plan

from infini_run.errors import UsageError
from infini_run.plan.model import RankRange
from infini_run.plan.rank_numbers import RankNumbers, spans_on
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from infini_run.options.launch_options import Options
    from infini_run.plan.model import FoundProgram, Node, Worker

    Variables = tuple[tuple[str, str], ...]


def number_ranks(
    options: Options, programs: Sequence[FoundProgram], nodes: Sequence[Node], spans: Sequence[RankRange]
) -> tuple[Options, Sequence[RankRange], Sequence[Sequence[RankRange]]]:
    """Number the ranks through all programs, in their order.

    Args:
        options: What the user asked for.
        programs: The programs.
        nodes: All nodes of the launch, or the one that `spans` is about.
        spans: The ranks of each program on that one node. Empty: `nodes` are all.

    Returns:
        The options with numbers in place of the ranks that they name by program; all ranks of the launch; and the
        ranks of each program on each node.

    Raises:
        UsageError: There is no such rank.
    """
    by_program: Sequence[Sequence[RankRange]] = [[span] for span in spans] or [
        spans_on([node.counts[index] for node in nodes]) for index in range(len(programs))
    ]
    numbers = RankNumbers([each.options.name for each in programs], [its[0].world_size for its in by_program])
    whole = RankRange(first=0, world_size=numbers.world_size, most=max(node.nproc for node in nodes))
    return numbers.in_options(options), (whole,), by_program


def split_alike(envs: Sequence[Variables], own: Container[str]) -> tuple[Variables, list[Variables]]:
    """Return the variables that the ranks of all programs see alike, and those of each program alone.

    Args:
        envs: What the ranks of each program see.
        own: Names that count as each program's own, also where the values are equal.
    """
    alike = tuple(pair for pair in envs[0] if pair[0] not in own and all(pair in env for env in envs))
    return alike, [tuple(pair for pair in env if pair not in alike) for env in envs]


def describe_programs(
    programs: Sequence[FoundProgram], sizes: Sequence[int], nodes: Sequence[Node], master_addr: str
) -> str:
    """Return what each rank learns of all programs, as JSON.

    Args:
        programs: The programs.
        sizes: How many ranks each has on all nodes.
        nodes: The nodes of the plan.
        master_addr: The address of a program without its own.
    """
    described = []
    for index, (program, size) in enumerate(zip(programs, sizes, strict=True)):
        name, addr = quoted(program.options.name), quoted(program.master_addr or master_addr)
        hosts = ", ".join(map(quoted, program.hosts or [node.host for node in nodes if node.counts[index]]))
        where = f'"addr": {addr}, "port": {program.master_port}'
        described.append(f'{{"name": {name}, "size": {size}, "hosts": [{hosts}], {where}}}')
    return f"[{', '.join(described)}]"


def with_own_variables(
    workers: tuple[Worker, ...],
    common: Sequence[tuple[str, str]],
    programs: Sequence[FoundProgram],
    environ: Mapping[str, str],
) -> tuple[Worker, ...]:
    """Return the workers so that a variable that only some programs set is inherited by the ranks of the others: what
    is set for one rank is inherited by none (Plan.base).

    Args:
        workers: All of the plan.
        common: The variables that all of them see.
        programs: The programs.
        environ: The launcher's environment.

    Raises:
        UsageError: A program has a variable of the plan among those that the user gave it.
    """
    firsts = {worker.program: worker for worker in reversed(workers)}
    _check_own_variables(firsts, common, programs)
    names = {program: {name for name, _ in worker.env} for program, worker in firsts.items()}
    ours = set().union(*names.values())
    inherited = {
        program: tuple((name, environ[name]) for name in sorted(ours - own) if name in environ)
        for program, own in names.items()
    }
    return tuple(
        replace(worker, env=worker.env + inherited[worker.program]) if inherited[worker.program] else worker
        for worker in workers
    )


def _check_own_variables(
    firsts: Mapping[str, Worker], common: Sequence[tuple[str, str]], programs: Sequence[FoundProgram]
) -> None:
    """Check that no program has a variable of the plan among those that the user gave it.

    firsts: a worker of each program that has one here.
    """
    for program in programs:
        first = firsts.get(program.options.name)  # None: it has no rank here
        names = [name for name, _ in (*common, *first.env)] if first is not None else []
        for name, _ in program.options.env:
            if names.count(name) > 1:
                raise UsageError(f"env of {program.options.name}: {name} is set by infini-run; use another name")
