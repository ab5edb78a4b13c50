import pytest

from cluster.pool import Pool


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
