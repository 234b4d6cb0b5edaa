"""Sessions on the module's database; the fixtures of ../conftest.py make that."""

import pytest
from sessions import Sessions


@pytest.fixture
def sessions(db):
    made = Sessions(db)
    yield made
    made.close()
