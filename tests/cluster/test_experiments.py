"""make experiments: its mechanism, on few rows. One shard and all shards touched, by the shards' logs; equal rows.

Never the time. What the run writes is in docs/experiments.md.
"""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

from experiments import files  # noqa: E402
from experiments.data import TABLES, Data  # noqa: E402
from experiments.measure import Unequal, measure, percentile  # noqa: E402
from experiments.questions import COLOCATED, CROSS, SCATTER, SINGLE  # noqa: E402
from experiments.routers import shard_of  # noqa: E402
from experiments.run import run  # noqa: E402
from experiments.settings import Settings  # noqa: E402
from experiments.site import Site  # noqa: E402

SHARDS, ITERATIONS, SCALING = 4, 5, (1, 2, 4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(total_rows=300, iterations=ITERATIONS, warmup=1, results=tmp_path_factory.mktemp("results"),
                    shards=SHARDS, scaling=SCALING)


@pytest.fixture(scope="module")
def results(shared_cluster, settings):
    """The folder that a run has written."""
    run(settings, shared_cluster, files.Console(settings.results / "console.log"), "experiments")
    return settings.results


@pytest.fixture(scope="module")
def site(shared_cluster, settings, results):
    with Site(shared_cluster, "experiments_site", SHARDS, Data(settings.total_rows, settings.seed)) as site:
        yield site


def test_files(results):
    assert {path.name for path in results.iterdir()} >= {
        "summary.txt", "console.log", "exp_a_routing.csv", "exp_b_scaling.csv", "exp_c_colocation.csv", "run_metadata.csv"}
    said, summary = (results / "console.log").read_text(), (results / "summary.txt").read_text()
    for heading in ("Experiment A.", "Experiment B.", "Experiment C."):
        assert heading in said and heading in summary
    metadata = {row["name"]: row["value"] for row in files.read(results / "run_metadata.csv")}
    assert metadata["total_rows"] == "300" and metadata["iterations"] == "5" and metadata["seed"] == "1234"
    assert metadata["image_digest"].startswith("sha256:") and metadata["postgres_version"]
    assert metadata["a_coordinator_single_shards_touched"] == "1"


def test_keyed_asks_one_shard_and_scattered_asks_all(results):
    rows = files.read(results / "exp_a_routing.csv")
    assert len(rows) == len(files.ROUTER_NAMES) * 2 * ITERATIONS
    for row in rows:
        wanted = {"single": "1", "scatter": str(SHARDS)}[row["query"]]
        assert (row["shards_touched"], row["shard_queries"]) == (wanted, wanted), row
        if row["router"] != "coordinator":
            assert row["shard_statements"] == wanted, row


def test_scaling_asks_as_many_shards_as_there_are(results):
    rows = files.read(results / "exp_b_scaling.csv")
    assert [(row["router"], int(row["n_shards"])) for row in rows] == [
        (router, shards) for router in files.ROUTER_NAMES for shards in SCALING]
    for row in rows:
        assert row["single_shards_touched"] == row["single_shard_queries"] == "1", row
        assert row["scatter_shards_touched"] == row["scatter_shard_queries"] == row["n_shards"], row


def test_join_asks_one_shard_if_colocated_and_else_all(results):
    rows = files.read(results / "exp_c_colocation.csv")
    assert [(row["router"], row["join"]) for row in rows] == [
        (router, join) for router in files.ROUTER_NAMES for join in ("colocated", "cross_shard")]
    for row in rows:
        # The object's own shard, and then all for its comments.
        shards, queries = {"colocated": (1, 1), "cross_shard": (SHARDS, 1 + SHARDS)}[row["join"]]
        assert (row["shards_touched"], row["shard_queries"]) == (str(shards), str(queries)), row


def test_rows_lie_where_md5_mod_n_says(shared_cluster, site):
    for table, (key, _) in TABLES.items():
        for number in range(SHARDS):
            keys = shared_cluster.shard_psql(number, f"SELECT DISTINCT {key} FROM {table}", site.name).split()
            assert keys and {shard_of(key, SHARDS) for key in keys} == {number}


def test_rows_of_all_routers_are_right(site):
    data = site.data
    for row in data.asked_for(20):
        file_key, number, name, user = row
        comments = [(name, c[1], c[3], c[4]) for c in data.comments if c[2] == number]
        expected = {SINGLE: [o for o in data.objects if o[0] == file_key],
                    SCATTER: [o for o in data.objects if o[3] == user], COLOCATED: comments, CROSS: comments}
        for question, rows in expected.items():
            assert rows
            for router in site.routers:
                found = router.ask(question, question.parameters(row))
                assert sorted(found) == sorted(rows), f"{router.name} {question.name}"


def test_unequal_rows_end_the_run(site, settings, monkeypatch):
    router = site.routers[1]
    ask = router.ask
    monkeypatch.setattr(router, "ask", lambda *args: ask(*args)[1:])
    with pytest.raises(Unequal):
        measure(site, [SINGLE], settings)


def test_same_seed_same_rows():
    assert Data(200, 1).objects == Data(200, 1).objects != Data(200, 2).objects
    assert Data(200, 1).asked_for(9) == Data(200, 1).asked_for(9)


def test_percentiles_are_values_that_were_seen():
    assert [percentile(range(1, 201), percent) for percent in (50, 99, 100)] == [100, 198, 200]
    assert percentile([7], 99) == 7


def test_settings_come_from_the_environment(monkeypatch):
    names = ("TOTAL_ROWS", "ITERATIONS", "WARMUP", "SEED", "RESULTS_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert Settings.from_environment() == Settings(50_000, 200, 10, 1234)
    for name, value in zip(names, ("100", "20", "0", "0", "/some/folder")):
        monkeypatch.setenv(name, value)
    assert Settings.from_environment() == Settings(100, 20, 0, 0, pathlib.Path("/some/folder"))
    for name, value in (("ITERATIONS", "0"), ("ITERATIONS", "many"), ("SEED", "-1")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=name):
            Settings.from_environment()
        monkeypatch.delenv(name)


def test_charts(results):
    pytest.importorskip("matplotlib", reason="installed by make experiments only")
    from experiments.charts import draw
    paths = draw(results)
    assert [path.name for path in paths] == ["exp_a_routing.png", "exp_b_scaling.png", "exp_c_colocation.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in paths)
