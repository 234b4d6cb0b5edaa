"""Figures on standard output, one a line: "name value". BENCH_ONLY, a regular expression, chooses them by name.

A program asks `wanted` before it measures, so that what nobody reads is not run. What is being done goes to standard
error by `say`.
"""

import os
import re
import statistics
import sys

ONLY = re.compile(os.environ.get("BENCH_ONLY") or "")


def wanted(*names):
    """Is any of these figures to be printed?"""
    return any(ONLY.search(name) for name in names)


def figure(name, value, digits=2):
    if wanted(name):
        print(f"{name} {value:.{digits}f}", flush=True)


def say(text):
    print(f"    {text}", file=sys.stderr, flush=True)


def ratio(measured, base):
    """The median over the rounds of what one way took, relative to what the other took in the same round."""
    return statistics.median(one / other for one, other in zip(measured, base, strict=True))
