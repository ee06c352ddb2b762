"""What stands in for OpenPBS's moms: runs what pbs_tmrsh asks for, as its own child, and tells it the exit code.

    pbs_mom.py SOCKET FOLDER      says "up" when it listens; SOCKET.tasks: the hosts and sessions of what it runs

As measured on OpenPBS 23.06: the task has PATH=/bin:/usr/bin, HOME and the job's own variables, nothing of the
caller's; no stdin; its output goes to the job's files; it lives on when its pbs_tmrsh is killed. TEST_* is passed:
by that a test finds what is its own.
"""

import json
import os
import socket
import subprocess
import sys
import threading


def serve(connection, folder):
    with connection, connection.makefile("rw") as stream:
        asked = json.loads(stream.readline())
        env = {"PATH": "/bin:/usr/bin", "HOME": "/root", "PBS_ENVIRONMENT": "PBS_BATCH", **asked["env"]}
        with open(f"{folder}/job.o", "ab") as out, open(f"{folder}/job.e", "ab") as err:
            words = asked["argv"]
            if os.geteuid() == 0:
                words = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', asked["host"], *words]
            try:
                os.stat(asked["argv"][0])
                task = subprocess.Popen(
                    words, env=env, cwd=env["HOME"], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True,
                )  # fmt: skip
            except OSError:
                code = 254
            else:
                with open(f"{sys.argv[1]}.tasks", "a") as tasks:
                    tasks.write(f"{asked['host']} {task.pid}\n")
                code = task.wait()
        try:
            stream.write(f"{abs(code)}\n")  # 9 for SIGKILL
            stream.flush()
        except OSError:
            pass  # its pbs_tmrsh was killed


with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen(64)
    os.write(1, b"up\n")
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0], sys.argv[2]), daemon=True).start()
