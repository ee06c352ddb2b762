#!/bin/sh
#SBATCH --job-name=ir-7f3a91c2e4
#SBATCH --output=/home/me/.infini/jobs/ir-7f3a91c2e4/job.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --cpus-per-gpu=8
#SBATCH --gres=gpu:8
# ir-7f3a91c2e4: 2 nodes x 8 gpus + 1 spare

cd / && exec /opt/env/bin/python -m infini_run.jobs.allocation_main /home/me/.infini/jobs/ir-7f3a91c2e4
