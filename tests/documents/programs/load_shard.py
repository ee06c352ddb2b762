import os
import socket
import time

others, _ours = socket.socketpair()


def load_shard():
    if os.environ["RANK"] == "2":
        time.sleep(600)


def all_reduce():
    others.recv(1)


while True:
    load_shard()
    all_reduce()
