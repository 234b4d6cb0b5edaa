"""One cluster of tenants for all tests of moves."""

import pytest
from crew import Crew
from tenants import Tenants, open_tenants


@pytest.fixture(scope="session")
def tenants():
    with open_tenants() as cluster:
        yield Tenants(cluster)


@pytest.fixture
def conn(tenants):
    with tenants.connect() as conn:
        yield conn


@pytest.fixture
def crew():
    crew = Crew()
    yield crew
    crew.over.set()
    for thread in crew.threads:
        thread.join()
