"""Two nodes, simulated by two raylets on this machine: one dies in mid-job, and nothing is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scale_jobs import contents, network, slow_part_loader

from salgp.store.extraction import extract_parts

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PARTS = 12


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and a second node with one core each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**27})
        try:
            made.second = made.add_node(num_cpus=1, object_store_memory=2**27)
            made.wait_for_nodes()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def test_a_node_that_dies_in_the_middle_of_an_extraction_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    extract_parts(network, slow_part_loader, PARTS, tmp_path / "expected")
    died: list[int] = []

    def kill_after_two() -> None:
        while len(list((tmp_path / "out").glob("part-*.parquet"))) < 2:
            time.sleep(0.05)
        died.append(len(list((tmp_path / "out").glob("part-*.parquet"))))
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill_after_two, daemon=True)
    killer.start()
    store = extract_parts(network, slow_part_loader, PARTS, tmp_path / "out", engine=cluster.address)
    killer.join(timeout=60)
    assert len(died) == 1
    assert died[0] < PARTS, "the node should have died before the end"
    assert store.n_shards == PARTS
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
