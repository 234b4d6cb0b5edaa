"""One cluster of tenants for all tests of moves."""

import pytest
from tenants import Tenants, open_tenants


@pytest.fixture(scope="session")
def tenants():
    with open_tenants() as cluster:
        yield Tenants(cluster)


@pytest.fixture
def conn(tenants):
    with tenants.connect() as conn:
        yield conn
