"""What scenarios have shown, a line of each: as a table, and as CSV."""

import csv
from dataclasses import dataclass, field

HEADINGS = ("scenario", "kills", "moves", "rows moved", "recopied", "changes", "pause p50 ms", "pause p99 ms", "writes", "reads", "failed",
            "lost", "doubled", "wavering", "left", "other", "seconds")
NAMED = ("lost", "doubled", "wavering", "left")


@dataclass
class Row:
    """`failures`: requests of clients that failed, by SQLSTATE. `pauses`: seconds, of each move that came to its flip."""

    scenario: str
    kills: int = 0
    moves: int = 0
    rows: int = 0
    recopied: int = 0
    changes: int = 0
    pauses: list = field(default_factory=list)
    writes: int = 0
    reads: int = 0
    longest: float = 0.0
    failures: dict = field(default_factory=dict)
    findings: list = field(default_factory=list)
    seconds: float = 0.0

    def add_move(self, move):
        self.moves += 1
        self.rows += move["rows_copied"]
        self.recopied += move["rows_recopied"]
        self.changes += move["changes"]
        if move["pause"] is not None:
            self.pauses.append(move["pause"].total_seconds())

    def found(self, *kinds):
        return [each for each in self.findings if each.kind in kinds]

    def cells(self):
        counts = [len(self.found(kind)) for kind in NAMED]
        pauses = [f"{1000 * percentile(self.pauses, p):.1f}" if self.pauses else "" for p in (50, 99)]
        return [self.scenario, self.kills, self.moves, self.rows, self.recopied, self.changes, *pauses, self.writes, self.reads,
                sum(self.failures.values()), *counts, len(self.findings) - sum(counts), f"{self.seconds:.1f}"]


def percentile(values, percent):
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def text(rows):
    cells = [list(HEADINGS), *[[str(cell) for cell in row.cells()] for row in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    aligned = [[cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths))]
               for line in cells]
    aligned.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in aligned)


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADINGS)
        writer.writerows(row.cells() for row in rows)
