"""The process of an agent, as an engine starts it.

agent_main.run                                            the Link is its stdin and stdout
agent_main.run --link=HOST,HOST:PORT --node=K|VARIABLE    it connects; INFINI_RUN_TOKEN is the token
"""

from __future__ import annotations

import fcntl
import sys

import infini_run.lean_os as os
from infini_run.errors import InfiniRunError, UsageError
from infini_run.multinode.agent.agent import Agent, print_line
from infini_run.multinode.agent.head_link import HeadGone
from infini_run.multinode.link.connection import MAGIC, TOKEN, Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def main(argv: Sequence[str]) -> int:
    """Run the agent and return its exit code.

    Args:
        argv: `--link`, `--node`, `--host`, `--facts` and `--token_file`, as engines.agent_argv writes them;
            `--exit_if_lost`, what to return if the head has gone.
    """
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in argv)
    environ = os.own_environ()
    facts = [environ.get(name, "") for name in flags.get("facts", "").split(",") if name]
    try:
        index = _node_index(flags.get("node", "-1"), environ)
        if "link" in flags:
            from infini_run.multinode.link.tcp import connect, retry_unheard

            host = (environ.get(flags["host"]) or os.uname().nodename) if "host" in flags else ""
            token = _token(flags.get("token_file", ""), environ)

            def join() -> int:
                connection = connect(flags["link"])
                try:
                    return Agent(connection, index, facts=facts, environ=environ, host=host).serve(token)
                finally:
                    connection.close()

            return retry_unheard(join, is_head_there=True)
        read_fd, write_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
        connection = Connection(read_fd, write_fd)
        connection.send(MAGIC)
        return Agent(connection, index, environ=environ).serve(None)
    except HeadGone:
        return int(flags.get("exit_if_lost", "0"))  # a dead head's srun answers 1, or a line, with SIGKILL to all
    except InfiniRunError as error:
        print_line(f"infini-run: {error}")
        return error.exit_code


def _node_index(text: str, environ: Mapping[str, str]) -> int:
    """Return the index of this node: a number, or the name of the variable that has it."""
    value = text if text.lstrip("-").isdecimal() else environ.get(text, "")
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{text} is {value or 'unset'} here: cannot tell which node of the engine this is") from None


def _token(path: str, environ: Mapping[str, str]) -> bytes:
    if not path:
        return os.fsencode(environ.get(TOKEN, ""))
    with open(path, "rb") as file:
        return file.read()


def run() -> None:
    """Run the agent of this process's arguments, and end without the interpreter's own clean-up."""
    os.drop_coerced_locale()
    os._exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
