#!/usr/bin/env bash
# The pictures of the documentation, from real runs; for root, because torchrun shows the path of its environment, which
# is mounted at /opt/torch for it. Made by `make pictures`, which makes both environments.
set -euo pipefail
if [ "${1:-}" != mounted ]; then
    exec unshare --mount "$0" mounted "$PWD/$BIN" "$PWD/$TORCH" "$PWD"
fi
bin=$2 torch=$3 here=$4
mount -t tmpfs tmpfs /opt
mkdir -p /opt/torch /opt/train
mount --bind "$torch" /opt/torch
cd /opt/train
export PATH=$bin:/opt/torch/bin:$PATH

cat >train.py <<'END'
import os
import time

rank = int(os.environ["RANK"])
for step in range(1, 31):
    time.sleep(0.06 + 0.02 * rank)
    print(f"step {step} loss {3 / step:.3f}", flush=True)
if rank == 2:
    raise RuntimeError("loss is nan")
time.sleep(60)
END
run="infini-run --live --nproc_per_node=4 --log_dir=logs train.py"
# shellcheck disable=SC2086 # words
python "$here/scripts/record.py" "$here/docs/assets/live.svg" --columns=92 -- "$run" $run

cat >train.py <<'END'
import os
import time

time.sleep(0.2)
if os.environ["RANK"] == "2":
    raise RuntimeError("loss is nan")
time.sleep(60)
END
run="infini-run --nproc_per_node=4 --log_dir=logs train.py"
# shellcheck disable=SC2086 # words
python "$here/scripts/record.py" "$here/docs/assets/failure.svg" --still --most=26 --columns=96 \
    -- "$run" $run -- "python -m torch.distributed.run --nproc_per_node=4 train.py" /opt/torch/bin/python -m torch.distributed.run --nproc_per_node=4 train.py
