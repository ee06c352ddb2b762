"""`infini-run --doctor`: this machine, every node, what differs between them, and the answer."""

from __future__ import annotations

from infini_run.doctor.finding import PROBLEM, Finding, failing, note, ok
from infini_run.doctor.machines import WAVE, Machine, look_at
from infini_run.doctor.rank_zero import CONNECT, LISTEN, NAME, place_of
from infini_run.doctor.rendering import render_json, render_text
from infini_run.multinode.engines import Contact, exit_text, find_engine, lines_of
from infini_run.options.nodes import check_doctor_engine
from infini_run.record import replace
from infini_run.system.interpreter import executable_text, own_python
from infini_run.system.stdio import fill_stdio
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList

_CALL = "infini_run.doctor.machine.run"
_LIMIT_S = 30.0
_CLOCK_NOTE_S, _CLOCK_PROBLEM_S = 1.0, 300.0  # of Kerberos, for one, a default


def run_doctor(
    options: Options, node_list: NodeList | None, environ: Mapping[str, str], form: str
) -> tuple[str, int]:
    """Look at this machine and at every node, all at once.

    Args:
        options: how to reach nodes, and how long to wait for one: --join_timeout, but 30 s at most.
        node_list: the nodes; None: this machine alone.
        environ: the environment of a launch.
        form: text or json.

    Returns:
        The answer, and the exit code: 1 if there is a problem.

    Raises:
        UsageError: the engine has no command for each node that brings back what is written there.
        StartError, ProgramMissing: the engine's command cannot be started.
    """
    fill_stdio()
    here = Machine("this machine", own_python(_CALL), explain=_explain_own)
    nodes = [] if node_list is None else _nodes(options, node_list, environ)
    look_at([here, *nodes], environ, min(_LIMIT_S, options.join_timeout_s))
    for node in nodes:
        if node.facts:
            node.findings[:0] = compare(node.facts, here.facts, node.clock_s)
    if node_list is not None:
        _let_meet(nodes, options, node_list, environ)
    machines = [here, *nodes]
    has_problem = any(finding.grade == PROBLEM for machine in machines for finding in machine.findings)
    return (render_json(machines) if form == "json" else render_text(machines)), int(has_problem)


def _explain_own(code: int | None, stderr: str) -> str:
    return exit_text(executable_text(), code, "".join(lines_of(stderr)[-1:]))


def _nodes(
    options: Options, node_list: NodeList, environ: Mapping[str, str], contact: Contact | None = None
) -> list[Machine]:
    """Return the command that checks each node. contact: another call than that."""
    check_doctor_engine(node_list.engine, f"--engine={node_list.engine}")
    engine = find_engine(node_list.engine)
    options = replace(options, least_nodes=1)  # the loss of one node does not end the command of another
    machines = []
    for index, host in enumerate(node_list.hosts):
        for command in engine.again_commands(host, index, options, contact or Contact(call=_CALL), environ):

            def explain(code: int | None, stderr: str, name: str = host.destination) -> str:
                return engine.explain_exit(name, code, stderr)

            machines.append(Machine(host.destination, command.argv, env=dict(command.env), explain=explain))
    return machines


def _let_meet(nodes: list[Machine], options: Options, node_list: NodeList, environ: Mapping[str, str]) -> None:
    """Have the nodes that answered connect to the first of them, where rank 0 will be; of very many, the first."""
    there = [(node, host) for node, host in zip(nodes, node_list.hosts, strict=True) if node.facts][:WAVE]
    if len(there) < 2 or there[0][0] is not nodes[0]:
        return
    place = place_of(options, nodes[0].facts, node_list.hosts[0].name)
    contacts = [Contact(call=LISTEN, target=place.to_listen(len(there) - 1))]
    contacts += [Contact(call=CONNECT, target=place.to_connect())] * (len(there) - 1)
    again = [
        machine
        for (_, host), contact in zip(there, contacts, strict=True)
        for machine in _nodes(options, replace(node_list, hosts=(host,)), environ, contact)
    ]
    look_at(again, environ, _LIMIT_S)
    for (node, _), found in zip(there, again, strict=True):
        node.findings += [
            replace(finding, name=NAME) for finding in found.findings if finding.name in (NAME, "reach")
        ]


def compare(node: Mapping[str, object], here: Mapping[str, object], clock_s: float) -> list[Finding]:
    """Say what differs between a node and the machine of the launcher.

    Args:
        node, here: the facts of both; those of this machine may be missing.
        clock_s: how far the node's clock is ahead.
    """
    version = str(node.get("version", ""))
    if version == VERSION:
        findings = [ok("reach", f"reached; infini-run there is {VERSION}, as here")]
    else:
        text = f"infini-run there is {version}, here {VERSION}: a launch fails; install the same version on both"
        findings = [failing("reach", text)]
    for what, name in (("Python", "python"), ("the architecture", "architecture")):
        ours, theirs = (_comparable(facts.get(name)) for facts in (here, node))
        if ours and theirs and ours != theirs:
            text = f"{what} there is {theirs}, here {ours}: programs may behave differently, and functions"
            findings.append(note("versions", f"{text} that were pickled by value may not load"))
    size = abs(clock_s)
    text = f"{size:.1f} s {'ahead' if clock_s > 0 else 'behind'}"
    if size >= _CLOCK_PROBLEM_S:
        findings.append(failing("clock", f"{text}: certificates and tickets fail, and files look too new or too old"))
    elif size >= _CLOCK_NOTE_S:
        findings.append(
            note("clock", f"{text}: times in logs of nodes differ; the trace of infini-run corrects them")
        )
    else:
        findings.append(ok("clock", "differs by less than a second"))
    return findings


def _comparable(value: object) -> str:
    """Return a version without its last number."""
    parts = str(value or "").split(".")
    return ".".join(parts[:2])
