"""What the run ran on, and how much else that machine had to do."""

import os
import pathlib
import time


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def processors():
    return len(os.sched_getaffinity(0))


def busy_percent(seconds=1.0):
    """Share of the processors' time that others use while this waits."""
    idle, total = _times()
    time.sleep(seconds)
    idle_then, total_then = _times()
    return 100 * (1 - (idle_then - idle) / max(1, total_then - total))


def _times():
    """Ticks of all processors since the start, idle and in all; waiting for a disk is idle."""
    ticks = [int(tick) for tick in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
