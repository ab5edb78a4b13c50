import pytest

from cluster.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Two processes."""
    made = Pool(2)
    yield made
    made.close()
