"""A parameter server and its workers, as two programs of one job. The server has the weights; in each step every
worker gets them, and returns the gradient of its part of the data."""

import json
import os
import random
import time
from multiprocessing.connection import Client, Listener

PROGRAMS = {each["name"]: each for each in json.loads(os.environ["JOB_PROGRAMS"])}
KEY, STEPS = os.environ["INFINI_RUN_ID"].encode(), 100


def serve():
    weights, size = [0.0, 0.0], PROGRAMS["worker"]["size"]
    with Listener(("127.0.0.1", int(os.environ["MASTER_PORT"])), backlog=size, authkey=KEY) as listener:
        workers = [listener.accept() for _ in range(size)]
    for step in range(STEPS):
        for worker in workers:
            worker.send(weights)
        gradients = [worker.recv() for worker in workers]
        means = [sum(part) / size for part in zip(*gradients, strict=True)]
        weights = [weight - 0.1 * mean for weight, mean in zip(weights, means, strict=True)]
        if step % 25 == 24:
            print(f"step {step + 1}: y = {weights[0]:.2f} x + {weights[1]:.2f}")


def work():
    draw = random.Random(int(os.environ["RANK"]))
    data = [(x, 3 * x + 1) for x in (draw.uniform(-1, 1) for _ in range(100))]
    with connect(PROGRAMS["server"]) as server:
        for _ in range(STEPS):
            a, b = server.recv()
            errors = [(2 * (a * x + b - y), x) for x, y in data]
            server.send([sum(error * x for error, x in errors) / 100, sum(error for error, _ in errors) / 100])


def connect(program):
    while True:
        try:
            return Client((program["addr"], program["port"]), authkey=KEY)
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.01)


{"server": serve, "worker": work}[os.environ["ROLE_NAME"]]()
