#!/bin/sh
#SBATCH --job-name=ir-7f3a91c2e4
#SBATCH --output=/home/me/.infini/jobs/ir-7f3a91c2e4/job.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --gpus=tesla:16
#SBATCH --nodes=1-16
#SBATCH --tasks-per-node=1
#SBATCH --gpus-per-task=tesla:8
# ir-7f3a91c2e4: 16 gpus on 1 to 16 nodes

cd / && exec /opt/env/bin/python -m infini_run.jobs.allocation_main /home/me/.infini/jobs/ir-7f3a91c2e4
