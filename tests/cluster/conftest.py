import pytest

from cluster.pool import Pool


def pytest_collection_modifyitems(items):
    """One worker of xdist has all tests that share processes, so that these are started once."""
    for item in items:
        if {"pool", "four", "processes"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def four():
    """Four processes."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool():
    """Two processes."""
    made = Pool(2)
    yield made
    made.close()
