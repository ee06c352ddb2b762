"""A debugger's user for a test: a client of the Debug Adapter Protocol, as VS Code is, for debugpy.

Each process that debugpy reports (`debugpyAttach`) gets a session of its own, with the same breakpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from infini_run.node.ports import free_port, let_go
from tests.support.waiting import LIMIT_S, until


class DebugClient:
    """Runs `python -m debugpy --listen ... WORDS`, with a breakpoint in one line of a script.

    hits: for each time that a process stopped there, the text of `expression` in it. follows: into its children, too.
    """

    def __init__(self, *words, script, line, expression, follows=True, **popen):
        self._options = {"justMyCode": True, "subProcess": follows}
        self._breakpoint = {"source": {"path": str(script)}, "breakpoints": [{"line": line}]}
        self._expression = expression
        self.hits = []
        self._threads = []
        self._port = free_port()
        listen = f"127.0.0.1:{self._port}"
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "debugpy", "--listen", listen, "--wait-for-client"]
        argv += ["--configure-subProcess", str(follows)]
        environ = {
            **os.environ,
            "DEBUGPY_PROCESS_SPAWN_TIMEOUT": str(LIMIT_S),
        }  # 15 s without, which a busy machine needs
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*argv, *map(str, words)], env=environ, **piped, **popen)

    def run(self):
        """The exit code, when it has run to its end with everything that stopped gone on."""
        until(lambda: _is_ready(self._port, self.process))
        self._attach({})
        out, err = self.process.communicate(timeout=LIMIT_S)
        for thread in self._threads:
            thread.join(LIMIT_S)
        return self.process.returncode, out, err

    def close(self):
        """End it, if it has not ended; its adapter ends with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        let_go(self._port)

    def _attach(self, more):
        thread = threading.Thread(target=_Session(self, more).run, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Session:
    """One process that is debugged."""

    def __init__(self, client, more):
        self._client = client
        self._more = more
        self._number = 0
        self._threads_asked = {}  # by the number of a request: the thread that is to go on

    def run(self):
        try:
            with socket.create_connection(("127.0.0.1", self._client._port)) as self._connection:
                self._file = self._connection.makefile("rb")
                self._send("initialize", adapterID="debugpy", pathFormat="path", clientID="vscode")
                self._send("attach", **self._client._options, **self._more)
                while (message := self._receive()) is not None:
                    self._handle(message)
        except OSError:  # it has ended
            return

    def _handle(self, message):
        event, body = message.get("event"), message.get("body") or {}
        if event == "initialized":
            self._send("setBreakpoints", **self._client._breakpoint)
            self._send("configurationDone")
        elif event == "debugpyAttach":
            self._client._attach({key: body[key] for key in ("subProcessId", "connect", "name") if key in body})
        elif event == "terminated":
            self._send("disconnect")
        elif message.get("command") == "disconnect":  # its adapter dies of a client that leaves before this answer
            raise OSError
        elif event == "stopped":
            self._threads_asked[self._send("stackTrace", threadId=body["threadId"])] = body["threadId"]
        elif message.get("command") == "stackTrace" and message.get("success"):
            frame = body["stackFrames"][0]["id"]
            number = self._send("evaluate", expression=self._client._expression, frameId=frame)
            self._threads_asked[number] = self._threads_asked[message["request_seq"]]
        elif message.get("command") == "evaluate":
            self._client.hits.append(body.get("result"))
            self._send("continue", threadId=self._threads_asked[message["request_seq"]])

    def _send(self, command, **arguments):
        self._number += 1
        text = json.dumps({"seq": self._number, "type": "request", "command": command, "arguments": arguments})
        self._connection.sendall(f"Content-Length: {len(text)}\r\n\r\n{text}".encode())
        return self._number

    def _receive(self):
        size = 0
        while (header := self._file.readline().strip()) != b"":
            size = int(header.partition(b":")[2])
        return json.loads(self._file.read(size)) if size else None


def _is_ready(port, process):
    """Whether its adapter listens, and has told the process so. A client that comes between the two makes it listen
    twice, and what connects to the wrong one of both is never debugged; the process listens until it is told."""
    assert process.poll() is None, process.stderr.read()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    folder, own = f"/proc/{process.pid}/fd", set()
    for entry in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(f"{folder}/{entry}"))
    return port in listening.values() and not own & listening.keys()
