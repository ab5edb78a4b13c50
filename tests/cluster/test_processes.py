import pytest

from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.processes import ProcessRanks


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_reason():
    with pytest.raises(RuntimeError, match=r"rank . of the learner failed: (.|\n)*has no len\(\)"):
        ProcessRanks(MeshShape(fsdp=2), len)
