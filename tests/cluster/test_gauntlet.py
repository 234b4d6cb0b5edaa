"""Keys move while clients read and write, and while sessions and servers are killed, connections cut, disks full: nothing
is lost, doubled, seen to waver or left behind. With a fault in it the same check must find it.

`make test` plays some scenarios with one seed; `make gauntlet` all of them, or those that SCENARIOS names, again and again for
MINUTES, with a seed of its own, which SEED repeats (as far as threads can be repeated). Read gauntlet/runner.py next.
"""

import os
import random
import re
import time
from collections import Counter

import pytest
from gauntlet import table
from gauntlet.arena import Arena
from gauntlet.faults import FAULTS
from gauntlet.ledger import Ledger, Stored, differences
from gauntlet.plans import hot_key
from gauntlet.runner import open_cluster, play
from gauntlet.scenarios import SCENARIOS, Scenario, missing_points, through

LONG = os.environ.get("GAUNTLET") == "long"
MINUTES = float(os.environ.get("GAUNTLET_MINUTES") or 0)
SEED = os.environ.get("GAUNTLET_SEED") or (str(random.SystemRandom().randrange(10**6)) if LONG else "1")
CHOSEN = re.compile(os.environ.get("GAUNTLET_SCENARIOS") or "")
CSV = os.environ.get("GAUNTLET_CSV")
SHARDS = int(os.environ.get("GAUNTLET_SHARDS") or 3)


def say(text):
    if LONG:
        print(text, flush=True)


@pytest.fixture(scope="module")
def cluster():
    with open_cluster(SHARDS) as cluster:
        yield cluster


def play_one(cluster, scenario, seed):
    say(f"== {scenario.name}")
    row = play(cluster, scenario, seed, log=lambda text: say(f"   {text}"))
    for finding in row.findings[:10]:
        say(f"   {finding}")
    return row


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(LONG, reason="all of them are played at length")
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.short], ids=lambda each: each.name)
def test_nothing_is_lost_doubled_or_left(cluster, scenario):
    if scenario.can_play():
        pytest.skip(scenario.can_play())
    row = play_one(cluster, scenario, SEED)
    assert not row.findings, "\n".join(map(str, row.findings[:10]))


@pytest.mark.timeout(0)
@pytest.mark.skipif(not LONG, reason="is for make gauntlet")
def test_at_length(cluster):
    began, rows, turn = time.monotonic(), [], 0
    chosen = [each for each in SCENARIOS if CHOSEN.search(each.name)]
    assert chosen, "no scenario has such a name"
    while not rows or time.monotonic() < began + 60 * MINUTES:
        turn += 1
        for scenario in chosen:
            if scenario.can_play():
                say(f"== {scenario.name} cannot be played here: {scenario.can_play()}")
            else:
                rows.append(play_one(cluster, scenario, f"{SEED}/{turn}"))
    say(f"\n{table.text(rows)}\nseed {SEED}")
    if CSV:
        table.write_csv(CSV, rows)
    assert not any(row.findings for row in rows), "\n".join(f"{row.scenario}: {each}" for row in rows for each in row.findings[:10])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS, ids=[each.name for each in FAULTS])
def test_a_fault_is_found(cluster, fault):
    scenario = Scenario(fault.name, hot_key, through([fault.point], fault))
    row = play(cluster, scenario, SEED, log=lambda text: say(f"   {text}"))
    say("\n".join(map(str, row.findings[:10])))
    assert row.kills == 1, "the fault was not provoked"
    assert fault.found <= {each.kind for each in row.findings}, row.findings


def test_no_crash_point_is_left_out(cluster):
    arena = Arena(cluster, "points")
    arena.cluster.new_database(arena.name, shards=0)
    try:
        assert missing_points(arena) == []
    finally:
        arena.cluster.drop_database(arena.name, shards=0)


def kinds(ledger, **stored):
    return [each.kind for each in differences([ledger], Stored(**stored))]


def test_the_check_itself():
    ledger = Ledger(1, confirmed={(7, 1)}, unknown={(7, 2)}, bare=Counter({7: 3}), bare_unknown=Counter({7: 1}))
    ledger.wrote_item((7, 5), 10, sure=True)
    ledger.wrote_item((7, 5), 11, sure=False)
    one, items = (7, 1, 1), {(7, 1, 5): [11]}
    assert not kinds(ledger, ops=Counter([one]), counters={7: [(1, 3)]}, items=items)
    assert not kinds(ledger, ops=Counter([one, (7, 1, 2)]), counters={7: [(2, 4)]}, items={(7, 1, 5): [10]})
    assert kinds(ledger, counters={7: [(0, 3)]}, items=items) == ["lost"]
    assert kinds(ledger, ops=Counter([one, one]), counters={7: [(1, 3)]}, items=items) == ["doubled"]
    assert kinds(ledger, ops=Counter([one, (7, 1, 3)]), counters={7: [(2, 3)]}, items=items) == ["doubled"]
    assert kinds(ledger, ops=Counter([one]), counters={7: [(0, 3)]}, items=items) == ["lost"]
    assert kinds(ledger, ops=Counter([one]), counters={7: [(2, 3)]}, items=items) == ["doubled"]
    assert kinds(ledger, ops=Counter([one]), counters={7: [(1, 2)]}, items=items) == ["lost"]
    assert kinds(ledger, ops=Counter([one]), counters={7: [(1, 5)]}, items=items) == ["doubled"]
    assert kinds(ledger, ops=Counter([one]), counters={7: [(1, 3), (1, 3)]}, items=items) == ["doubled"]
    assert kinds(ledger, ops=Counter([one]), items=items) == ["lost"]
    for found, kind in (([], "lost"), ([12], "lost"), ([10, 10], "doubled")):
        assert kinds(ledger, ops=Counter([one]), counters={7: [(1, 3)]}, items={(7, 1, 5): found}) == [kind]
    ledger.wrote_item((7, 5), None, sure=True)
    assert kinds(ledger, ops=Counter([one]), counters={7: [(1, 3)]}, items=items) == ["doubled"]


def test_percentiles_of_pauses():
    assert table.percentile([3.0, 1.0, 2.0], 50) == 2.0 and table.percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert table.percentile(list(range(1, 101)), 99) == 99
