"""One bank for all tests of commits, and one that tests may break."""

import itertools

import pytest
from ledger import open_ledger


@pytest.fixture(scope="session")
def bank():
    with open_ledger() as ledger:
        yield ledger


_numbers = itertools.count()


@pytest.fixture
def ledger(bank):
    """The bank, at rest before and after; what a test left is cleared up by hand, to save time."""
    yield bank
    bank.wait_for_coordinator()
    bank.cluster.psql("SELECT shardmap.resolve_transactions()")
    bank.settle()


@pytest.fixture
def ids(bank):
    """An account of each shard, others for each test."""
    number = next(_numbers)
    return [bank.keys(shard)[number % len(bank.keys(shard))] for shard in range(3)]


@pytest.fixture
def conn(ledger):
    with ledger.connect() as conn:
        yield conn
