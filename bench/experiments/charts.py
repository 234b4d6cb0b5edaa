"""Charts of experiments A, B and C, drawn from their CSV files: `python -m experiments.charts FOLDER` draws them anew."""

import pathlib
import sys

import matplotlib

from .files import ROUTER_NAMES, read
from .measure import Sample, summarize
from .routers import LABELS

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the choice of what it draws with)

# Told apart by colour-blind readers, and by marker in grey.
LOOKS = {"sequential": ("#E69F00", "s"), "at_once": ("#009E73", "^"), "coordinator": ("#0072B2", "o")}
FIGURES = ("p50", "mean", "p99")
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
         "axes.grid.axis": "y", "grid.color": "#dddddd", "legend.frameon": False, "figure.dpi": 110}


def draw(folder):
    """Draws all three, and returns their paths."""
    folder = pathlib.Path(folder)
    with pyplot.rc_context(STYLE):
        charts = {"exp_a_routing": routing(folder), "exp_b_scaling": scaling(folder),
                  "exp_c_colocation": colocation(folder)}
        paths = [folder / f"{name}.png" for name in charts]
        for path, figure in zip(paths, charts.values()):
            figure.savefig(path)
            pyplot.close(figure)
    return paths


def routing(folder):
    samples = [Sample(row["router"], row["query"], int(row["iteration"]), float(row["latency_ms"]), int(row["rows"]),
                      int(row["shards_touched"])) for row in read(folder / "exp_a_routing.csv")]
    values, shards = {}, {}
    for query in ("single", "scatter"):
        for router in ROUTER_NAMES:
            s = summarize(samples, router, query)
            values[router, query] = {"p50": s.p50, "mean": s.mean, "p99": s.p99}
            shards[query] = max(s.shards[1], shards.get(query, 0))
    names = {"single": f"WHERE file_key = ...\n{count(shards['single'])}",
             "scatter": f"WHERE created_by = ...\n{count(shards['scatter'])}"}
    return bars("A. A query with the shard key, and one without", names, values)


def colocation(folder):
    values, shards = {}, {}
    for row in read(folder / "exp_c_colocation.csv"):
        values[row["router"], row["join"]] = {figure: float(row[f"{figure}_ms"]) for figure in FIGURES}
        shards[row["join"]] = max(int(row["shards_touched"].split("-")[-1]), shards.get(row["join"], 0))
    names = {"colocated": f"comments by file\n{count(shards['colocated'])}",
             "cross_shard": f"comments by author\n{count(shards['cross_shard'])}"}
    return bars("C. An object with its comments, colocated and not", names, values)


def count(shards):
    return "1 shard" if shards == 1 else f"{shards} shards"


def bars(title, names, values):
    """A panel for each figure; in it a group of bars for each name, a bar for each router, labelled with its value."""
    figure, panels = pyplot.subplots(1, len(FIGURES), figsize=(12, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13)
    width = 0.27
    for panel, what in zip(panels, FIGURES):
        for offset, router in enumerate(ROUTER_NAMES):
            heights = [values[router, name][what] for name in names]
            places = [group + (offset - 1) * width for group in range(len(names))]
            drawn = panel.bar(places, heights, width * 0.94, color=LOOKS[router][0], label=LABELS[router])
            panel.bar_label(drawn, fmt="%.2f", fontsize=8.5, padding=2)
        panel.set_xticks(range(len(names)), names.values())
        panel.tick_params(axis="x", length=0)
        panel.set_title(f"{what}, ms", fontsize=11)
        panel.margins(y=0.12)
    legend(figure, panels[0])
    return figure


def scaling(folder):
    """Rows of panels for the two queries, columns for the figures; both scales are logarithms."""
    rows = read(folder / "exp_b_scaling.csv")
    counts = sorted({int(row["n_shards"]) for row in rows})
    figure, panels = pyplot.subplots(2, len(FIGURES), figsize=(12, 7.6), sharex=True, sharey=True, layout="constrained")
    figure.suptitle("B. The same rows on 1 to %d shards" % counts[-1], fontsize=13)
    for line, (query, about) in enumerate((("single", "with the key: 1 shard"), ("scatter", "without: all N shards"))):
        for panel, what in zip(panels[line], FIGURES):
            for router in ROUTER_NAMES:
                points = {int(row["n_shards"]): float(row[f"{query}_{what}_ms"]) for row in rows if row["router"] == router}
                colour, marker = LOOKS[router]
                panel.plot(counts, [points[n] for n in counts], color=colour, marker=marker, markersize=5,
                           label=LABELS[router])
            panel.set_title(f"{about}, {what}", fontsize=11)
            if query == "scatter":
                base = min(float(row[f"scatter_{what}_ms"]) for row in rows if int(row["n_shards"]) == counts[0])
                panel.plot(counts, [base * n / counts[0] for n in counts], color="#888888", linestyle=":", linewidth=1.2,
                           label="proportional to N", zorder=1)
                panel.set_xlabel("N, shards")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(counts, counts)
            panel.minorticks_off()
            panel.grid(True, axis="both")
        panels[line][0].set_ylabel("ms")
    label_decades(panels[0][0])
    legend(figure, panels[1][0])
    return figure


def label_decades(panel):
    """Plain numbers at 1, 2 and 5 of each decade, on the scale that all panels share."""
    panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def legend(figure, panel):
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


if __name__ == "__main__":
    for chart in draw(sys.argv[1]):
        print(chart)
