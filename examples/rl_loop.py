"""Reinforcement learning in small: samplers try arms of a slot machine by the policy of a trainer, as two programs of
one job. The trainer ends the job, and samplers are stopped. With the argument `crash`, sampler 1 crashes once: if
samplers may restart alone, the trainer waits for the new ones, and keeps what it has learned."""

import contextlib
import itertools
import json
import math
import os
import random
import sys
import time
from multiprocessing.connection import Client, Listener

PROGRAMS = {each["name"]: each for each in json.loads(os.environ["JOB_PROGRAMS"])}
KEY, CHANCES, BATCH = os.environ["INFINI_RUN_ID"].encode(), [0.2, 0.5, 0.9], 50


def policy(weights):
    powers = [math.exp(weight) for weight in weights]
    return [power / sum(powers) for power in powers]


def train():
    weights, size, samplers = [0.0] * len(CHANCES), PROGRAMS["sampler"]["size"], []
    listener = Listener(("127.0.0.1", int(os.environ["MASTER_PORT"])), backlog=size, authkey=KEY)
    for step in range(1, 101):
        tries = []
        while not tries:
            samplers = samplers or [listener.accept() for _ in range(size)]
            try:
                tries = sample_all(samplers, weights)
            except (EOFError, ConnectionError):
                print(f"step {step}: lost the samplers; waiting for new ones")
                samplers = []
        chances, mean = policy(weights), sum(reward for _, reward in tries) / len(tries)
        for arm, reward in tries:
            for other, chance in enumerate(chances):
                weights[other] += 0.5 * (reward - mean) * ((other == arm) - chance) / BATCH
        if step % 25 == 0:
            print(f"step {step}: reward {mean:.2f}, arm 2 has {policy(weights)[2]:.2f}")


def sample_all(samplers, weights):
    for sampler in samplers:
        sampler.send(weights)
    return [each for sampler in samplers for each in sampler.recv()]


def sample():
    fails = sys.argv[1:] == ["crash"] and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10"
    with connect(PROGRAMS["trainer"]) as trainer, contextlib.suppress(EOFError, ConnectionError):  # it has ended
        for step in itertools.count(1):
            if fails and step == 60:
                sys.exit("the simulator crashed")
            arms = random.choices(range(len(CHANCES)), policy(trainer.recv()), k=BATCH)
            trainer.send([(arm, float(random.random() < CHANCES[arm])) for arm in arms])


def connect(program):
    while True:
        try:
            return Client((program["addr"], program["port"]), authkey=KEY)
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.01)


{"trainer": train, "sampler": sample}[os.environ["ROLE_NAME"]]()
