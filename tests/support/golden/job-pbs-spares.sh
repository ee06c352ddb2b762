#!/bin/sh
#PBS -N ir-7f3a91c2e4
#PBS -j oe
#PBS -o /home/me/.infini/jobs/ir-7f3a91c2e4/job.out
#PBS -r n
#PBS -l select=3:ncpus=64:ngpus=8
#PBS -l place=scatter
#PBS -W tolerate_node_failures=all
# ir-7f3a91c2e4: 2 nodes x 8 gpus + 1 spare

exec >>/home/me/.infini/jobs/ir-7f3a91c2e4/job.log 2>&1
cd / && exec /opt/env/bin/python -m infini_run.jobs.allocation_main /home/me/.infini/jobs/ir-7f3a91c2e4
