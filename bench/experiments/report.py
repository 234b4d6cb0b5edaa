"""What a run says: one table for each experiment, and the ratios that the experiments are about."""

from .files import ROUTER_NAMES, span
from .measure import summarize
from .routers import LABELS

HEAD = f"{'':26}{'router':22}{'p50 ms':>9}{'p99 ms':>9}{'mean ms':>9}{'shards':>8}{'queries':>9}{'rows':>7}"


def pair_table(title, samples, first, second):
    """Lines on two questions, the second of which asks all shards, and the ratios between them."""
    lines = [title, "", HEAD]
    for query in (first, second):
        for router in ROUTER_NAMES:
            s = summarize(samples, router, query)
            lines.append(f"{query:26}{LABELS[router]:22}{s.p50:9.3f}{s.p99:9.3f}{s.mean:9.3f}"
                         f"{span(s.shards):>8}{span(s.queries):>9}{s.rows:7.1f}")
    lines.append("")
    for router in ROUTER_NAMES:
        one, all_of_them = (summarize(samples, router, query) for query in (first, second))
        lines.append(f"{second + ' / ' + first:26}{LABELS[router]:22}{all_of_them.p50 / one.p50:8.1f}x"
                     f"{all_of_them.p99 / one.p99:8.1f}x{all_of_them.mean / one.mean:8.1f}x")
    return lines + [""]


def scaling_table(title, by_shards):
    """Lines on both questions for each N; "x" columns are in relation to the first N."""
    cells = f"{'p50':>9}{'mean':>9}{'p99':>9}{'p50 x':>8}{'mean x':>8}"
    lines = [title, "", f"{'':26}{'single, ms':>27}{'scatter, ms':>43}", f"{'router':22}{'N':>4}{cells}{cells}{'queries':>9}"]
    for router in ROUTER_NAMES:
        first = {}
        for shards, samples in by_shards.items():
            line = f"{LABELS[router]:22}{shards:4}"
            for query in ("single", "scatter"):
                s = summarize(samples, router, query)
                base = first.setdefault(query, s)
                line += f"{s.p50:9.3f}{s.mean:9.3f}{s.p99:9.3f}{s.p50 / base.p50:8.1f}{s.mean / base.mean:8.1f}"
            lines.append(f"{line}{span(s.queries):>9}")
        lines.append("")
    return lines


def headlines(a, b, c):
    """The figures of run_metadata.csv."""
    found = {}
    for router in ROUTER_NAMES:
        for letter, samples, queries in (("a", a, ("single", "scatter")), ("c", c, ("colocated", "cross_shard"))):
            for query in queries:
                s = summarize(samples, router, query)
                found[f"{letter}_{router}_{query}_p50_ms"] = f"{s.p50:.4f}"
                found[f"{letter}_{router}_{query}_shards_touched"] = span(s.shards)
        few, many = min(b), max(b)
        for query in ("single", "scatter"):
            first, last = (summarize(b[n], router, query) for n in (few, many))
            found[f"b_{router}_{query}_p50_n{many}_over_n{few}"] = f"{last.p50 / first.p50:.2f}"
            found[f"b_{router}_{query}_mean_n{many}_over_n{few}"] = f"{last.mean / first.mean:.2f}"
    return found
