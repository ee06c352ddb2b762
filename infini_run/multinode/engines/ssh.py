"""ssh: one OpenSSH client a node, with the user's own configuration. The link is its stdin and stdout.

No terminal is asked for (-T): it would mangle frames. What the agent is told goes over stdin, so nothing of the
environment or of the arguments is on a command line. Sources: ssh(1), ssh_config(5), sshd_config(5) for
MaxStartups, which refuses connections at random when many come at once.
"""

from __future__ import annotations

from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended, lacks_us, said
from infini_run.system.shell import enclosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 64
OVER_STDIO = True
TOKEN_BY_FILE = False
ENDS_STOPPED = True
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "EscapeChar=none")
_NO_CONNECTION = 255  # ssh's own failures; all else is the remote side's
_PASSING = ("kex_exchange_identification", "Connection reset", "Connection closed by", "banner exchange")
_NO_PROGRAM = (126, 127)  # a shell's word for what cannot be run
_HINTS = (  # what ssh says, and what to do
    ("Could not resolve hostname", "is the name right? ssh knows it by --ssh_config, DNS or /etc/hosts"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: look why, then ssh-keygen -R {host}"),
    ("Host key verification failed", "its host key is not known here: ssh {host} once by hand"),
    ("Permission denied", "no key of ours is taken there: ssh-copy-id {host}, or an agent (ssh-add -l)"),
    ("Can't open user config file", "it is the one of --ssh_config"),
    ("timed out", "is it up, and is the port open?"),
    ("Connection refused", "is sshd running there, on that port?"),
)


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """One ssh for each host."""
    words = _words(options)
    remote = " ".join(["exec", *map(enclosed, agent_words(options, contact))])
    return [
        EngineCommand(argv=(*words, "--", host.destination, remote), nodes=(index,))
        for index, host in enumerate(hosts)
    ]


def _words(options: Options) -> list[str]:
    words = ["ssh", *(("-F", options.ssh_config) if options.ssh_config else ()), "-T", "-x"]
    for option in _OPTIONS:
        words += ["-o", option]
    return words


def explain(host: str, code: int | None, words: str) -> str:
    """ssh's own last words, or those of what ran there; and what to do about them."""
    lines = said(words)
    about = lines[-1] if lines else ""
    what = ended("ssh", code, about)
    hint = _hint(host, code, words, about)
    return f"{what}; {hint}" if hint else what


def _hint(host: str, code: int | None, words: str, about: str) -> str:
    if code in (_NO_CONNECTION, None):
        own = next((hint for text, hint in _HINTS if text in words), "").format(host=host)
        if own or code is not None:
            return own
    if lacks_us(about):
        return "install infini-run there, or give --remote_python=PATH of a Python that has it"
    if code in _NO_PROGRAM or "Command not found" in about:
        return "give --remote_python=PATH of a Python there that has infini-run"
    return ""


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """SIGKILL to each agent, by a connection of its own; the guard there ends its ranks. Where ssh's own end closes
    the connection, sshd ends nothing: it closes the agent's stdin, which one that is stopped does not read."""
    return [
        EngineCommand(argv=(*_words(options), "--", host.destination, _kill(hello)), nodes=(index,))
        for host, index, hello in told
        if type(hello.get("pid")) is int and str(hello.get("begun", "")).isdecimal()
    ]


def _kill(hello: Mapping[str, Any]) -> str:
    """For whatever shell is there: kills that process, if it is still that one."""
    pid, begun = hello["pid"], hello["begun"]
    return f"""exec sh -c 'case "$(cat /proc/{pid}/stat)" in *" {begun} "*) kill -KILL {pid};; *) exit 1;; esac'"""


def is_passing(code: int | None, words: str) -> bool:
    """A connection that sshd dropped before it knew who we are (MaxStartups)."""
    return code in (_NO_CONNECTION, None) and any(text in words for text in _PASSING)


def blames(words: str) -> str:
    """It ends nobody for another's end that the Link would not tell of."""
    return ""
