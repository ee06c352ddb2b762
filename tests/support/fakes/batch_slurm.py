"""sbatch, squeue, scancel, scontrol, sinfo, sacct and srun, as Slurm 22.05 answers: batch_slurm.py COMMAND WORD..."""

import _signal as signal
import os
import sys
import time

from batch_queue import FOLDER, PRESENT, Book, after, before, start, tell

TIMED_OUT = "{}: error: {}: Socket timed out on send/recv operation"
DATABASE_AWAY = ("slurm_persist_conn_open_without_init: failed to open persistent connection to host:localhost:6819: "
                 "Connection refused")  # fmt: skip
VALUES = """job-name output open-mode partition account wckey time nodes ntasks ntasks-per-node tasks-per-node
cpus-per-gpu cpus-per-task gpus gpus-per-task mem gres exclude constraint comment qos name states format jobs user
export cpu-bind mpi input nodelist kill-on-bad-exit starttime signal chdir"""
FLAGS = "parsable requeue no-requeue exclusive test-only noheader me exact allocations parsable2 quiet unbuffered"
LONGS = [f"{name}=" for name in VALUES.split()] + FLAGS.split()


def fail(text, code=1):
    print(text, file=sys.stderr)
    sys.exit(code)


def read(command, words):
    import getopt

    try:
        given, rest = getopt.getopt(words, "hN:n:o:p:j:n:t:C:x:w:", LONGS)
    except getopt.GetoptError as wrong:
        fail(f"{command}: unrecognized option '--{wrong.opt}'\nTry \"{command} --help\" for more information", 255)
    return dict(given), rest


def sbatch(words, fault):
    import shlex

    given, (script, *_) = read("sbatch", words)
    with open(script) as file:
        text = file.read()
    lines = [shlex.split(line[7:]) for line in text.splitlines() if line.startswith("#SBATCH")]
    asked = {k: v for line in lines for k, v in read("sbatch", line)[0].items()} | given
    low = int(asked.get("--nodes", "1").partition("-")[0])
    with Book() as book:
        settings = book.settings
        if fault == "refuse":
            fail("sbatch: error: Batch job submission failed: Invalid account or account/partition")
        pool = asked.get("--partition", settings["default"])
        if pool not in settings["pools"]:
            fail(f"sbatch: error: invalid partition specified: {pool}\nsbatch: error: Batch job submission failed: "
                 "Invalid partition name specified")  # fmt: skip
        nodes = list(settings["nodes"])
        if "--test-only" in asked:
            if low > len(nodes):
                fail("allocation failure: Requested node configuration is not available")
            print(f"sbatch: Job 1 to start at now using 1 processors on nodes {nodes[0]}", file=sys.stderr)
            return
        number = book.add(
            kind="slurm", name=asked.get("--job-name", os.path.basename(script)), nodes=nodes[:low], pool=pool,
            output=asked.get("--output", f"{FOLDER}/slurm-%j.out").replace("%%", "\0").replace("\0", "%"),
            appends=asked.get("--open-mode") == "append", cwd=os.getcwd(), limit_s=seconds(asked.get("--time", "0")),
            requeues="--no-requeue" not in asked, env={},
        )  # fmt: skip
        job = book.jobs[number]
        job["output"] = job["output"].replace("%j", number)
        job["env"] = {**os.environ, **job_env(job, asked)}
        if low > len(nodes):
            job["reason"] = "PartitionNodeLimit"
    with open(f"{FOLDER}/{number}.sh", "w") as file:
        file.write(text)
    if low <= len(nodes):
        start(number)
    after(fault, TIMED_OUT.format("sbatch", "Batch job submission failed"))
    print(number if "--parsable" in asked else f"Submitted batch job {number}")


def job_env(job, asked):
    count = len(job["nodes"])
    gpus = asked.get("--gres", "").partition("gpu:")[2].partition(",")[0].rpartition(":")[2]
    env = {"SLURM_JOB_ID": job["id"], "SLURM_JOB_NAME": job["name"], "SLURM_JOB_NUM_NODES": str(count),
           "SLURM_JOB_NODELIST": ",".join(job["nodes"]), "SLURMD_NODENAME": (job["nodes"] or [""])[0],
           "SLURM_NTASKS": str(count), "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": os.getcwd()}  # fmt: skip
    return env | ({"SLURM_GPUS_ON_NODE": gpus} if gpus else {})


def seconds(text):
    """Minutes, or a clock."""
    parts = [int(part) for part in text.split(":")]
    return parts[0] * 60 if len(parts) == 1 else sum(n * 60**i for i, n in enumerate(parts[::-1]))


def squeue(words, fault):
    given, _ = read("squeue", words)
    names = given.get("--name", "").split(",")
    with Book() as book:
        for number, job in book.jobs.items():
            is_shown = job["state"] in PRESENT or (given.get("--states") == "all" and not book.settings["forget"])
            is_asked = job["name"] in names or given.get("-j", given.get("--jobs")) == number or names == [""]
            if is_shown and is_asked:
                print(line(number, job, given.get("--format", given.get("-o", "%i"))))
    after(fault, TIMED_OUT.format("slurm_load_jobs", "Unable to get jobs"))


def line(number, job, form):
    end = time.localtime(job["begin_s"] + job["limit_s"]) if job["limit_s"] and job["begin_s"] else None
    reason = job["reason"] or {"FAILED": "NonZeroExitCode", "TIMEOUT": "TimeLimit"}.get(job["state"], "None")
    nodes = "" if job["state"] == "PENDING" else ",".join(job["nodes"])
    for mark, text in (("%j", job["name"]), ("%i", number), ("%T", job["state"]), ("%r", reason), ("%N", nodes),
                       ("%e", time.strftime("%Y-%m-%dT%H:%M:%S", end) if end else "N/A")):  # fmt: skip
        form = form.replace(mark, text)
    return form


def scancel(words, fault):
    for number in [word for word in words if not word.startswith("-")]:
        with Book() as book:
            job = book.jobs.get(number.partition(".")[0])
            if job is None:
                fail(f"scancel: error: Kill job error on job id {number}: Invalid job id specified")
            if job["state"] == "PENDING" and not job["keeper"]:
                job["state"] = "CANCELLED"
            else:
                tell(job, signal.SIGTERM)
    after(fault, TIMED_OUT.format("scancel", "Kill job error"))


def scontrol(words, fault):
    if words[:2] == ["show", "config"]:
        with Book() as book:
            settings = book.settings
        gres = "gpu" if any(node.get("gpus") for node in settings["nodes"].values()) else "(null)"
        kind = "slurmdbd" if settings["accounting"] else "none"
        for name, text in {"AccountingStorageType": f"accounting_storage/{kind}", "GresTypes": gres,
                           "MinJobAge": "300 sec", "SelectType": f"select/{settings['select']}",
                           "SLURM_VERSION": "22.05.8", "TaskPlugin": "task/none"}.items():  # fmt: skip
            print(f"{name:<23} = {text}")
    elif words[0] == "requeue":
        with Book() as book:
            job = book.jobs.get(words[1])
            if job is None or not job["keeper"]:
                fail("Invalid job id specified")
            if not job["requeues"]:
                fail("Requested operation is presently disabled for job " + words[1])
            if job.get("requeued") == job["restarts"]:
                fail("Job is pending execution for job " + words[1])
            job["requeued"] = job["restarts"]
            tell(job, signal.SIGUSR1)
    after(fault, TIMED_OUT.format("scontrol", "slurm_load"))


def sinfo(words, fault):
    with Book() as book:
        for name, pool in book.settings["pools"].items():
            kinds = {}
            for node in book.settings["nodes"].values():
                gres = f"gpu:{node['gpus']}" if node.get("gpus") else "(null)"
                kinds[node["cpus"], gres] = kinds.get((node["cpus"], gres), 0) + 1
            for (cpus, gres), count in kinds.items():
                star = "*" if name == book.settings["default"] else ""
                print(f"{name}{star}|{count}|{cpus}|8000|{pool.get('limit', 'infinite')}|{gres}")


def sacct(words, fault):
    given, _ = read("sacct", words)
    names, numbers = given.get("--name", "").split(","), given.get("--jobs", "").split(",")
    with Book() as book:
        if not book.settings["accounting"]:
            fail("Slurm accounting storage is disabled")
        for number, job in book.jobs.items():
            was_eligible = job["begin_s"] or job["state"] in PRESENT
            if number in numbers or (job["name"] in names and was_eligible):
                state = "CANCELLED by 0" if job["state"] == "CANCELLED" else job["state"]
                print(f"{job['name']}|{number}|{state}|{job['code']}:0|{','.join(job['nodes'])}")


def srun(words, fault):
    """One task on each node, here; all end with the first one that ends badly."""
    import subprocess

    given, argv = read("srun", words)
    nodes = given.get("--nodelist", os.environ["SLURM_JOB_NODELIST"]).split(",")[: int(given.get("--nodes", "99"))]
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": ",".join(nodes), "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "SLURM_STEP_NUM_TASKS": str(len(nodes)), "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(nodes)})"}  # fmt: skip
    named = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"'] if os.geteuid() == 0 else []
    asked = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    tasks = {}
    for index, node in enumerate(nodes):
        own = {"SLURM_NODEID": str(index), "SLURM_PROCID": str(index), "SLURM_LOCALID": "0", "SLURMD_NODENAME": node}
        task = subprocess.Popen(
            [*named, node, *argv] if named else argv, env={**os.environ, **step, **own}, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )  # fmt: skip
        tasks[task.pid] = task
    worst = 0
    while tasks:
        if signal.sigwait(asked) == signal.SIGTERM:
            for pid in tasks:
                os.killpg(pid, signal.SIGKILL)
        for task in [task for task in tasks.values() if task.poll() is not None]:
            del tasks[task.pid]
            code = task.returncode if task.returncode >= 0 else 128 - task.returncode
            worst = max(worst, code)
            if code:
                print(f"srun: error: task 0: Exited with exit code {code}", file=sys.stderr)
                for other in tasks:
                    os.killpg(other, signal.SIGTERM)
    sys.exit(worst)


def main():
    command = sys.argv[1]
    fault = before(command)
    if fault == "away" and command == "sacct":
        fail(f"sacct: error: {DATABASE_AWAY}\nsacct: error: Sending PersistInit msg: Connection refused\n"
             "sacct: error: Problem talking to the database: Connection refused")  # fmt: skip
    if fault == "away":
        fail(f"{command}: error: Unable to contact slurm controller (connect failure)")
    globals()[command](sys.argv[2:], fault)
