"""Kubernetes, the pods of an Indexed Job, also of a JobSet (kubernetes.io, "Job with Pod-to-Pod Communication").

How many there are is not in the environment. A pod's name is `<job>-<index>`; where the Job has a headless service
its /etc/hosts has `<job>-<index>.<service>...`, and the first pod is found by that name with index 0. In a JobSet
of several Jobs the index counts within one of them only, so there it does not say which node this is.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.value_types import number

_INDEX = "JOB_COMPLETION_INDEX"


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a pod of a Kubernetes indexed job; None: this process is none."""
    if not around.has(_INDEX):
        return None
    index = around.number(_INDEX)
    host = around.text("HOSTNAME")
    domain = _domain(around, host) if host.endswith(f"-{index}") else ""
    job = host[: len(host) - len(str(index)) - 1]
    is_whole = _is_first_job(job, domain)
    first = f"{job}-0.{domain}" if domain and is_whole else ""
    return around.cluster(
        "kubernetes",
        node_rank=(index, _INDEX) if is_whole else (-1, ""),
        master_addr=(first, "HOSTNAME" if first else ""),
        job_id=(job, "HOSTNAME") if domain else ("", ""),
    )


def _domain(around: Variables, host: str) -> str:
    """Return what follows the name of this host in its full name in /etc/hosts."""
    for line in around.file("/etc/hosts").splitlines():
        for name in line.partition("#")[0].split()[1:]:
            if host and name.startswith(host + "."):
                return name[len(host) + 1 :]
    return ""


def _is_first_job(job: str, domain: str) -> bool:
    """Return whether a Job is the first of its JobSet, or in none. By default, a JobSet's service has the JobSet's
    name, and its Jobs are `<jobset>-<name>-<number>`."""
    service = domain.partition(".")[0]
    is_of_a_set = bool(service) and job.startswith(service + "-")
    return not is_of_a_set or not number(job.rpartition("-")[2])
