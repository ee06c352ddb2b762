import os
import sys
import time

if os.environ["RANK"] == "2":
    sys.exit(7)
time.sleep(600)
