"""What a failure prints: where it is (a seed to give again), what ran, both answers, the plan."""


class Failure:
    def __init__(self, where, why, statements, details):
        self.where, self.why, self.statements, self.details = where, why, list(statements), details

    def __str__(self):
        seed = self.where.split()[0]
        ran = "\n".join(self.statements)
        return (f"\n=== {self.why} at {self.where}\n    again: DIFFERENTIAL_SEED={seed} scripts/test-cluster.sh -k differential -s\n"
                f"{ran}\n{self.details}\n")
