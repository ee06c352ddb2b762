import time


def read_shard():
    time.sleep(600)


print("step 1")
read_shard()
