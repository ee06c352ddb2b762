"""qsub, qstat, qsig, qdel, qselect and qmgr, as OpenPBS 23.06.06 answers: batch_pbs.py COMMAND WORDS...

To the word, as printed by one that was built from its source. `qstat -f -F json A B` prints the first job alone.
"""

import _signal as signal
import os
import pwd
import sys

from batch_queue import FOLDER, PRESENT, Book, after, before, start, tasks_of, tell

SERVER = "pbshead"
LETTERS = "a:A:c:C:e:fGhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
NO_HISTORY = "PBS is not configured to maintain job history"
OVER = "Job has finished, use -x or -H to obtain historical job information"
AWAY = f"Connection refused\n{{}}: cannot connect to server {SERVER} (errno=15010)"
HEAD = {"timestamp": 1, "pbs_version": "23.06.06", "pbs_server": SERVER}


def fail(text, code):
    print(text, file=sys.stderr)
    sys.exit(code)


def options(words):
    """Directives of the script first: what the command line says wins, and of two select the first."""
    import getopt

    try:
        given, rest = getopt.getopt(words, LETTERS)
    except getopt.GetoptError as wrong:
        fail(f"qsub: invalid option -- '{wrong.opt}'\nusage: qsub [-a date_time] ...", 2)
    return given, rest


def qsub(words, fault):
    import re
    import shlex

    given, (script,) = options(words)
    with open(script) as file:
        text = file.read()
    lines = [options(shlex.split(line[5:]))[0] for line in text.splitlines() if line.startswith("#PBS")]
    asked = {"-N": os.path.basename(script), "-q": "workq", "-o": ""}
    resources = {}
    for name, value in [pair for line in lines for pair in line] + given:
        if name == "-l":
            for item in re.split(r",(?=[a-z]+=)", value):
                resources.setdefault(*item.partition("=")[::2])
        else:
            asked[name] = value
    with Book() as book:
        if asked["-q"] not in book.settings["pools"]:
            fail("qsub: Unknown queue", 170)
        if not re.fullmatch(r"[A-Za-z0-9_.+-]{1,230}", asked["-N"]):
            fail("qsub: illegal -N value", 2)
        unknown = [name for name in resources if name not in ("select", "place", "walltime")]
        if unknown:
            fail(f"qsub: Unknown resource Resource_List.{unknown[0]}", 187)
        if fault == "refuse":
            fail("qsub: Unauthorized Request ", 159)
        array = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?:%(\d+))?", asked.get("-J", "0-1"))
        if not array or int(array[1]) >= int(array[2]):
            fail("qsub: illegal -J value", 2)
        if "-J" in asked and asked.get("-r") == "n":
            fail("qsub:  cannot submit non-rerunable Array Job", 2)
        chunks = int(resources.get("select", "1").partition(":")[0])
        hosts = placed(book.settings["nodes"], chunks, resources)
        mpiprocs = re.search(r":mpiprocs=(\d+)", resources.get("select", ""))
        limit = book.settings["pools"][asked["-q"]].get("resources_default", {}).get("walltime", "0")
        parts = [int(part) for part in resources.get("walltime", limit).split(":")]
        job = {
            "kind": "pbs", "name": asked["-N"], "nodes": hosts, "output": asked["-o"] or f"{FOLDER}/job.o",
            "appends": False, "cwd": os.environ.get("HOME", "/"), "lines": int(mpiprocs[1] if mpiprocs else 1),
            "limit_s": sum(n * 60**i for i, n in enumerate(parts[::-1])),
            "queue": asked["-q"], "select": resources.get("select", ""), "place": resources.get("place", ""),
            "env": job_env(asked["-N"]),
        }  # fmt: skip
        if len(hosts) < chunks:
            job["reason"] = never(book.settings["nodes"], job["select"])
        job["env"] |= dict(pair.split("=", 1) for pair in asked.get("-v", "").split(",") if "=" in pair)
        number, numbers = book.new(), []
        if "-J" in asked:
            first, last, step, most = (int(part or 0) for part in array.groups())
            number += "[]"
            book.add(number, **job, array=number)
            book.jobs[number]["state"] = "ARRAY"
            for index in range(first, last + 1, step or 1):
                numbers.append(number.replace("[]", f"[{index}]"))
                env = {**job["env"], "PBS_ARRAY_INDEX": str(index), "PBS_ARRAY_ID": f"{number}.{SERVER}"}
                own = {**job, "env": env, "output": job["output"].replace("^array_index^", str(index))}
                book.add(numbers[-1], **own, array=number, at_once=most)
        else:
            numbers.append(book.add(number, **job))
        for one in numbers:
            book.jobs[one]["env"]["PBS_JOBID"] = f"{one}.{SERVER}"
            book.jobs[one]["env"]["PBS_NODEFILE"] = f"{FOLDER}/{one}.nodes"
    for one in numbers:
        with open(f"{FOLDER}/{one}.sh", "w") as file:
            file.write(text)
    if len(hosts) == chunks:
        start(number)
    after(fault, f"qsub: cannot send job script: End of File from server {SERVER}")
    print(f"{number}.{SERVER}")


def placed(nodes, chunks, resources):
    """A host for each chunk: as many on one as fit there, but for place=scatter."""
    each = {"ncpus": "1"} | dict(item.split("=", 1) for item in resources.get("select", "1").split(":")[1:])
    hosts = []
    for name, node in nodes.items():
        fit = min(node.get(kind, 0) // int(each[kind]) for kind in ("ncpus", "ngpus") if kind in each)
        hosts += [name] * (min(fit, 1) if "scatter" in resources.get("place", "") else fit)
    return hosts[:chunks]


def never(nodes, select):
    """Why it can never run."""
    each = dict(item.split("=", 1) for item in select.split(":")[1:])
    for name in ("host", "vnode"):
        if name in each and each[name] not in nodes:
            others = ",".join(nodes)
            return f"Can Never Run: Insufficient amount of resource: {name} ({each[name]} != {others})"
    for name in ("ncpus", "ngpus"):
        has = max(node.get(name, 0) for node in nodes.values())
        if int(each.get(name, 0)) > has:
            total = sum(node.get(name, 0) for node in nodes.values())
            return f"Can Never Run: Insufficient amount of resource: {name} (R: {each[name]} A: {total} T: {total})"
    return "Can Never Run: Not enough total nodes available"


def job_env(name):
    """Nothing of the submitter's but what PBS takes with it, and what tests find their own by."""
    env = {key: text for key, text in os.environ.items() if key.startswith("TEST_")}
    env |= {f"PBS_O_{key}": os.environ[key] for key in ("HOME", "PATH") if key in os.environ}
    env |= {"PATH": f"{FOLDER}/bin:/bin:/usr/bin", "HOME": os.environ.get("HOME", "/")}
    env |= {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBNAME": name, "PBS_O_WORKDIR": os.getcwd()}
    return env | {"PBS_TASKNUM": "00000001", "PBS_NODENUM": "0", "NCPUS": "1", "OMP_NUM_THREADS": "1"}


def clock(time_s):
    return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"


def is_over(jobs, job):
    """A task of an array is there as long as another one is."""
    tasks = tasks_of(jobs, job["id"]) or [job]
    return all(task["state"] not in PRESENT for task in tasks)


def told(job, over):
    """What qstat -f says of a job. Of a task that has ended before its array no more than that: the rest is the
    array's."""
    is_array = job["state"] == "ARRAY"
    if is_array or (job["state"] not in PRESENT and not over):
        letter, comment = ("B", "Job Array Began at Sun Nov 22 at 14:23") if is_array else ("X", "Subjob finished")
        return {"Job_Name": job["name"], "job_state": "F" if over else letter, "queue": job["queue"],
                "server": SERVER, "substate": 70, "comment": comment, "Exit_status": 1}  # fmt: skip
    ended = job["state"] not in PRESENT
    letter = {"PENDING": "Q", "RUNNING": "R", "COMPLETING": "E"}.get(job["state"], "F")
    said = {"Job_Name": job["name"], "job_state": letter, "queue": job["queue"], "server": SERVER,
            "substate": {"Q": 10, "R": 42, "E": 51}.get(letter, 92),
            "Resource_List": {"select": job["select"]}}  # fmt: skip
    if job["limit_s"]:
        said["Resource_List"]["walltime"] = clock(job["limit_s"])
    if letter == "Q":
        said["comment"] = job["reason"] or "Not Running: Insufficient amount of resource: ncpus"
    elif not ended:
        said["exec_host"] = "+".join(f"{node}/0*8" for node in job["nodes"])
    else:
        said["Exit_status"] = job["code"] if job["code"] <= 128 else job["code"] + 128
        said["comment"] = "Job run at Sat Nov 21 at 22:00 and finished"
        if job["state"] == "FAILED":
            said |= {"substate": 93, "comment": said["comment"].replace("finished", "failed")}
        elif job["state"] == "CANCELLED":
            comment = "Job run at Sun Nov 22 at 12:07 on (pbsn1:ncpus=1) and terminated by pbs@pbshead"
            said |= {"substate": 91, "Exit_status": job["code"] and 271, "comment": comment}
        elif job["state"] == "TIMEOUT":
            said |= {"substate": 93, "Exit_status": -29}
    return said


def qstat(words, fault):
    if words == ["--version"]:
        print("pbs_version = 23.06.06")
        return
    with Book() as book:
        settings, jobs = book.settings, dict(book.jobs)
    list_jobs([word for word in words if word[0].isdigit()], jobs, settings, words, fault)


def list_jobs(ids, jobs, settings, words, fault):
    is_history, is_dsv = "-x" in words, "dsv" in words
    found, code = {}, 0
    if is_history and not settings["history"]:  # and nothing else, with exit code 0
        for job_id in ids:
            print(f"qstat: {NO_HISTORY} {job_id}", file=sys.stderr)
        ids = []
    said = []
    for job_id in ids:
        job = jobs.get(job_id.partition(".")[0])
        over = job is not None and is_over(jobs, job)
        if job is None or (over and not settings["history"]):
            said.append((f"qstat: Unknown Job Id {job_id}", 153))
        elif over and not is_history:
            said.append((f"qstat: {job_id} {OVER}", 35))
        else:
            found[job_id] = told(job, over)
    if "-E" in words and len(ids) > 1:  # all in one request: of those that are not there nothing is said
        said = [] if found else said[:1]
    for text, code in said:  # noqa: B007 - the last one's is the exit code
        print(text, file=sys.stderr)
    if fault == "first" or not is_dsv:
        found = dict(list(found.items())[:1])
    if is_dsv:
        delimiter = words[words.index("-D") + 1] if "-D" in words else "|"
        for job_id, job in found.items():
            print(delimiter.join([f"Job Id: {job_id}", *(f"{name}={value}" for name, value in flat(job))]))
    else:
        import json

        print(json.dumps({**HEAD, **({"Jobs": found} if found else {})}))
    after(fault, AWAY.format("qstat"), 255)
    sys.exit(code)


def flat(job):
    """Its attributes; a control character is not printed as it is."""
    for name, value in job.items():
        for key, text in (
            ((f"{name}.{key}", text) for key, text in value.items()) if isinstance(value, dict) else ((name, value),)
        ):
            yield key, str(text).replace("\x1f", "^_").replace("\n", "\\n")


def qdel(words, fault):
    code = 0
    for job_id in words:
        with Book() as book:
            job = book.jobs.get(job_id.partition(".")[0])
            over = job is not None and is_over(book.jobs, job)
            if job is None or (over and not book.settings["history"]):
                print(f"qdel: Unknown Job Id {job_id}", file=sys.stderr)
                code = 153
            elif over:
                print(f"qdel: Job has finished {job_id}", file=sys.stderr)
                code = 35
            elif job["state"] == "COMPLETING":
                print(f"qdel: Request invalid for state of job {job_id}", file=sys.stderr)
                code = 168
            elif job["state"] not in (*PRESENT, "ARRAY"):
                print(f"qdel: Request invalid for finished array subjob {job_id}", file=sys.stderr)
                code = 55
            else:
                for one in tasks_of(book.jobs, job["id"]) if "[]" in job_id else [job]:
                    if one["state"] == "PENDING" and not one["keeper"]:
                        one["state"] = "CANCELLED"
                    elif one["state"] in PRESENT:
                        tell(one, signal.SIGTERM)
    after(fault, f"Connection refused\nCouldn't connect to cluster: {SERVER}", 162)
    sys.exit(code)


def qsig(words, fault):
    """-s NAME JOB...: to what runs on the first node, and nowhere else."""
    _, name, *ids = words
    code = 0
    for job_id in ids:
        with Book() as book:
            job = book.jobs.get(job_id.partition(".")[0])
            over = job is not None and is_over(book.jobs, job)
            if job is None or (over and not book.settings["history"]):
                text, code = f"qsig: Unknown Job Id {job_id}", 153
            elif over:
                text, code = "qsig: Job has finished", 35
            elif job["state"] != "RUNNING" or fault == "early":
                text, code = f"qsig: Request invalid for state of job {job_id}", 168
            else:
                job["signal"] = name
                tell(job, signal.SIGUSR2)
                continue
        print(text, file=sys.stderr)
    after(fault, AWAY.format("qsig"), 162)
    sys.exit(code)


def qselect(words, fault):
    import getopt

    given = dict(getopt.getopt(words, "xN:u:")[0])
    with Book() as book:
        if "-x" in given and not book.settings["history"]:
            fail(f"qselect: {NO_HISTORY}", 0)
        for number, job in book.jobs.items():
            if "at_once" in job:  # -T lists tasks
                continue
            is_there = not is_over(book.jobs, job) or "-x" in given
            is_named = given.get("-N", job["name"]) == job["name"]
            is_ours = given.get("-u", pwd.getpwuid(os.geteuid()).pw_name) == pwd.getpwuid(os.geteuid()).pw_name
            if is_there and is_named and is_ours:
                print(f"{number}.{SERVER}")


def qmgr(words, fault):
    """What is asked on stdin: list server, list queue @default, list node @default."""
    with Book() as book:
        settings = book.settings
    server = {"server_state": "Active", "server_host": SERVER, "default_queue": "workq",
              "acl_roots": ",".join(f"root@host{n}.a-domain-with-a-name" for n in range(4)),
              "pbs_version": "23.06.06", "job_history_enable": str(settings["history"])}  # fmt: skip
    objects = {"server": {SERVER: server}}
    objects["queue"] = {name: {"queue_type": "Execution", "enabled": "True", "started": "True", **queue}
                        for name, queue in settings["pools"].items()}  # fmt: skip
    objects["node"] = {
        name: {"Mom": name, "state": "free", "pcpus": node["ncpus"],
               "resources_available": {"arch": "linux", "host": name, "vnode": name, "mem": "8192000kb", **node}}
        for name, node in settings["nodes"].items()
    }  # fmt: skip
    print("Max open servers: 49")
    for line in sys.stdin:
        kind = line.split()[1]
        for name, attributes in objects[kind].items():
            print(kind.capitalize(), name)
            for key, value in attributes.items():
                for resource, text in value.items() if isinstance(value, dict) else [("", value)]:
                    shown(f"{key}.{resource}" if resource else key, str(text))
            print()
    after(fault, f"qmgr: cannot connect to server {SERVER}")


def shown(name, text):
    """As qmgr breaks it into lines, behind a comma."""
    length = len(name) + 11
    print(f"    {name} = ", end="")
    for at, part in enumerate(text.split(",")):
        length += len(part) + 1
        print("," * (at > 0) + "\n\t" * (at > 0 and length >= 80) + part, end="")
    print()


def main():
    command = sys.argv[1]
    fault = before(command)
    if fault == "away":
        fail(AWAY.format(command), {"qstat": 255, "qmgr": 2}.get(command, 162))
    globals()[command](sys.argv[2:], fault)
