#!/bin/bash
#PBS -l select=4:ncpus=8:ngpus=8:mpiprocs=8
#PBS -l place=scatter
#PBS -l walltime=4:00:00
PATH=~/.venv/run/bin:$PATH # a job of PBS has a PATH of its own
cd "$PBS_O_WORKDIR" || exit
exec infini-run --engine=auto train.py
