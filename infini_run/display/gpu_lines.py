"""How busy each GPU is, on stdout: a separate process, since NVML waits without end for a GPU that hangs.

A line per GPU or MIG instance (watchdog/gpu_reading.py): its UUID, percent (- is unknown), the bytes in use, and
pid=bytes for each process that holds memory on it.
"""

from __future__ import annotations

from infini_run.display.resource_usage import open_meter


def main() -> None:
    """Print the lines. Without a GPU there are none."""
    meter = open_meter()
    for card in meter.read() if meter is not None else ():
        held = (f"{pid}={size}" for pid, size in card.held.items())
        print(card.uuid, "-" if card.use is None else round(card.use * 100), card.memory, *held)
    if meter is not None:
        meter.close()
