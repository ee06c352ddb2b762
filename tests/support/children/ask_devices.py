"""Answers questions about devices, one JSON object a line, so that a test can choose the NVML that is loaded.

A question is {"set": variables for the driver, "call": function, "args": [...]}, an answer {"is": its result}
or {"error": the text of its DeviceError}. Anything else ends the process with a traceback.
"""

import json
import os
import sys

from infini_run.devices import nvidia, visible
from infini_run.errors import DeviceError


def fields(record):
    return dict(vars(record))


for line in sys.stdin:
    question = json.loads(line)
    os.environ.update(question["set"])
    call = getattr(nvidia, question["call"], None) or getattr(visible, question["call"])
    try:
        answer = {"is": call(*question["args"])}
    except DeviceError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer, default=fields), flush=True)
