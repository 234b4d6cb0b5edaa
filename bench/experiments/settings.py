"""What a run is told, from the environment; the defaults are those of the harness that this one follows."""

import os
import pathlib
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """`shards` is N of experiments A and C, `scaling` are the Ns of B."""

    total_rows: int = 50_000
    iterations: int = 200
    warmup: int = 10
    seed: int = 1234
    results: pathlib.Path = HERE / "results"
    shards: int = 8
    scaling: tuple = (1, 2, 4, 8, 16, 32)

    @classmethod
    def from_environment(cls):
        """TOTAL_ROWS, ITERATIONS, WARMUP, SEED and RESULTS_DIR; what is unset or empty keeps its default."""
        numbers = {name: whole_number(name.upper()) for name in ("total_rows", "iterations", "warmup", "seed")}
        given = {name: value for name, value in numbers.items() if value is not None}
        if os.environ.get("RESULTS_DIR"):
            given["results"] = pathlib.Path(os.environ["RESULTS_DIR"]).resolve()
        return cls(**given)


def whole_number(name):
    """The variable's value; None if it is unset or empty."""
    text = os.environ.get(name)
    if not text:
        return None
    least = 0 if name in ("WARMUP", "SEED") else 1
    if not text.isdecimal() or int(text) < least:
        raise SystemExit(f"error: {name}={text} is not a whole number of at least {least}")
    return int(text)
