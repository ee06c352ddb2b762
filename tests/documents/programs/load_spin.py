import itertools
import os

import infini_run


def load_batch():
    sum(itertools.repeat(0))


def all_reduce():
    sum(itertools.repeat(0))


infini_run.progress(1)
if os.environ["RANK"] == "1":
    load_batch()
all_reduce()
