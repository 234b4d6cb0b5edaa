"""One cluster with replicas for all tests of reads, whole and caught up before each."""

import pytest
from places import Place, make_cluster


@pytest.fixture(scope="session")
def site():
    with make_cluster() as cluster:
        yield Place(cluster)


@pytest.fixture
def place(site):
    site.settle()
    return site


@pytest.fixture
def conn(place):
    with place.connect() as conn:
        yield conn
