"""Cray's PALS: its mpiexec, beside PBS. Under Slurm the same variables are srun's, so Slurm is asked first."""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.environments.mpi import Words, site_of

_WORDS = Words(
    rank="PMI_RANK", size="PMI_SIZE", local_rank="PMI_LOCAL_RANK", local_size="PMI_LOCAL_SIZE", job="PALS_APID"
)


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a process of HPE's PALS (mpiexec, aprun); None: this process is none."""
    if not around.has("PALS_RANKID", _WORDS.rank, _WORDS.size, _WORDS.local_rank, _WORDS.local_size):
        return None
    return site_of("pals", around, _WORDS)
