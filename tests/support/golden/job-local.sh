#!/bin/sh
# ir-7f3a91c2e4: 1 node x 2 gpus

cd / && exec /opt/env/bin/python -m infini_run.jobs.allocation_main /home/me/.infini/jobs/ir-7f3a91c2e4
