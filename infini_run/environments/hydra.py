"""Hydra and its relatives: MPICH, Intel MPI, MVAPICH.

`srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE too; the local names below are the launcher's alone.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.environments.mpi import Words, site_of

_MV2 = "MV2_COMM_WORLD_"
_ALL = (
    Words(rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"),
    Words(rank=_MV2 + "RANK", size=_MV2 + "SIZE", local_rank=_MV2 + "LOCAL_RANK", local_size=_MV2 + "LOCAL_SIZE"),
)


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a process of MPICH's or Intel MPI's mpiexec (Hydra); None: this process is none."""
    for words in _ALL:
        if around.has(words.rank, words.size, words.local_rank, words.local_size):
            return site_of("hydra", around, words)
    return None
