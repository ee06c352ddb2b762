#!/bin/bash
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --time=4:00:00
#SBATCH --output=slurm-%j.out
exec infini-run --engine=auto --nproc_per_node=8 train.py
