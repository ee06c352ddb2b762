import os
import socket
import time

others, _ours = socket.socketpair()
rank = os.environ["RANK"]


def load_shard():
    if rank == "2":
        time.sleep(600)


def all_reduce():
    others.recv(1)


def check_loss():
    if rank == "3":
        time.sleep(2)
        raise SystemExit("loss is NaN at step 1200")


check_loss()
load_shard()
all_reduce()
