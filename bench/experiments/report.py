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
    lines = [title, "", f"{'router':22}{'N':>4}{'single mean':>13}{'to N=1':>8}{'p99':>9}"
                        f"{'scatter mean':>15}{'to N=1':>8}{'p99':>9}{'queries':>9}"]
    for router in ROUTER_NAMES:
        first = None
        for shards, samples in by_shards.items():
            single, scatter = (summarize(samples, router, query) for query in ("single", "scatter"))
            first = first or (single.mean, scatter.mean)
            lines.append(f"{LABELS[router]:22}{shards:4}{single.mean:13.3f}{single.mean / first[0]:7.1f}x{single.p99:9.3f}"
                         f"{scatter.mean:15.3f}{scatter.mean / first[1]:7.1f}x{scatter.p99:9.3f}{span(scatter.queries):>9}")
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
            growth = summarize(b[many], router, query).mean / summarize(b[few], router, query).mean
            found[f"b_{router}_{query}_mean_n{many}_over_n{few}"] = f"{growth:.2f}"
    return found
