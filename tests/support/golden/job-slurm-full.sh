#!/bin/sh
#SBATCH --job-name=ir-7f3a91c2e4
#SBATCH --output=/home/me/.infini/jobs/ir-7f3a91c2e4/job.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH "--wckey=plan b"
#SBATCH --time=4:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-gpu=4
#SBATCH --mem=4000M
#SBATCH --gres=gpu:8,nvme:1
#SBATCH --exclude=n1,n2
#SBATCH "--comment=two words"
#SBATCH -H
# ir-7f3a91c2e4: 2 nodes x 8 gpus

cd / && exec /opt/env/bin/python -m infini_run.jobs.allocation_main /home/me/.infini/jobs/ir-7f3a91c2e4
