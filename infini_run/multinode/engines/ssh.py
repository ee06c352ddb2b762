"""ssh: one OpenSSH client for each node, with the user's own configuration. The Link is its stdin and stdout.

ssh asks for no terminal (-T), because a terminal would change the bytes of frames. Options and variables go to the
agent over stdin, so none of them stands on a command line. Sources: ssh(1), ssh_config(5), sshd_config(5) for
MaxStartups: sshd refuses connections at random when many come at once.
"""

from __future__ import annotations

from infini_run.multinode.engines import (
    Contact,
    Engine,
    EngineCommand,
    agent_argv,
    exit_text,
    lacks_infini_run,
    lines_of,
)
from infini_run.system.shell import enclosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import KnownAgent
    from infini_run.options.launch_options import Options

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "EscapeChar=none")
_NO_CONNECTION = 255  # ssh itself failed; any other code is that of the remote command
_TRANSIENT = ("kex_exchange_identification", "Connection reset", "Connection closed by", "banner exchange")
_NO_PROGRAM = (126, 127)  # exit codes of a shell that cannot run a command
_HINTS = (  # part of a message of ssh, what the user can do
    ("Could not resolve hostname", "check the name in --ssh_config, DNS, and /etc/hosts"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key changed; find out why, then run ssh-keygen -R {host}"),
    ("Host key verification failed", "its host key is unknown here; run ssh {host} once"),
    (
        "Permission denied",
        "it accepts none of your keys; run ssh-copy-id {host}, or check your ssh agent (ssh-add -l)",
    ),
    ("Can't open user config file", "check --ssh_config"),
    ("timed out", "check that it is up and the port open"),
    ("Connection refused", "check that sshd runs there, on that port"),
)


class SshEngine(Engine):
    """One ssh for each host."""

    MAX_CONCURRENT = 64
    USES_STDIO = True
    ENDS_STOPPED = True

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        ssh = _ssh(options)
        remote = " ".join(["exec", *map(enclosed, agent_argv(options, contact))])
        return [
            EngineCommand(argv=(*ssh, "--", host.destination, remote), nodes=(index,))
            for index, host in enumerate(hosts)
        ]

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        """Quote the last line of ssh, or of the remote command, and add a hint for the messages in `_HINTS`."""
        lines = lines_of(stderr)
        reason = lines[-1] if lines else ""
        text = exit_text("ssh", code, reason)
        hint = _hint(host, code, stderr, reason)
        return f"{text}; {hint}" if hint else text

    def cleanup_commands(self, agents: Sequence[KnownAgent], options: Options) -> list[EngineCommand]:
        """Return one more ssh for each agent, which sends SIGKILL to it; the guard there ends its ranks. The end of
        the first ssh is not enough: then sshd only closes the agent's stdin, which a suspended agent does not
        read."""
        return [
            EngineCommand(argv=(*_ssh(options), "--", host.destination, _kill(hello)), nodes=(index,))
            for host, index, hello in agents
            if type(hello.get("pid")) is int and str(hello.get("start_ticks", "")).isdecimal()
        ]

    def has_reached(self, code: int | None) -> bool:
        return code not in (_NO_CONNECTION, None)

    def has_agent_ended(self, code: int | None) -> bool:
        """Return whether the remote side sent the exit status: any code but ssh's own is that (ssh(1), EXIT
        STATUS)."""
        return code is not None and 0 <= code < _NO_CONNECTION

    def is_transient(self, code: int | None, stderr: str) -> bool:
        """Return whether sshd dropped the connection before it knew the user (MaxStartups)."""
        return code in (_NO_CONNECTION, None) and any(text in stderr for text in _TRANSIENT)


def _ssh(options: Options) -> list[str]:
    argv = ["ssh", *(("-F", options.ssh_config) if options.ssh_config else ()), "-T", "-x"]
    for option in _OPTIONS:
        argv += ["-o", option]
    return argv


def _hint(host: str, code: int | None, stderr: str, reason: str) -> str:
    if code in (_NO_CONNECTION, None):
        own = next((hint for text, hint in _HINTS if text in stderr), "").format(host=host)
        if own or code is not None:
            return own
    if lacks_infini_run(reason):
        return "install infini-run there, or add --remote_python=PATH, a Python that has it"
    if code in _NO_PROGRAM or "Command not found" in reason:
        return "add --remote_python=PATH, a Python there with infini-run"
    return ""


def _kill(hello: Mapping[str, Any]) -> str:
    """Return a command for any login shell: SIGKILL to the agent, if the process of that number is still the
    agent."""
    pid, ticks = hello["pid"], hello["start_ticks"]
    return f"""exec sh -c 'case "$(cat /proc/{pid}/stat)" in *" {ticks} "*) kill -KILL {pid};; *) exit 1;; esac'"""
