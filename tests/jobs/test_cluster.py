"""Nodes and clusters."""

import pytest

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import Cluster, Node, node_name


def test_a_cluster_keeps_each_node_once_in_order():
    """Nodes that are declared inside a cluster are listed once, in the order of first declaration."""
    with Cluster() as cluster:
        for name in ("b", "a", "b", "c"):
            Node(name)
    Node("elsewhere")
    assert cluster.nodes == ("b", "a", "c")


def test_the_earlier_option_of_a_node_wins():
    """A node declared twice keeps the earlier value of an option and takes new ones."""
    with Cluster() as cluster:
        Node("a", gpus=1)
        Node("a", gpus=2, memory=3)
    assert dict(cluster.options("a")) == {"gpus": 1, "memory": 3}


def test_only_the_name_counts():
    """Two nodes of one name are equal, and print as the name."""
    assert Node("trainer:0") == Node("trainer:0") != Node("trainer:1")
    assert len({Node("a"), Node("a")}) == 1
    assert str(Node("a")) == "a"


def test_no_node_is_current_unless_entered():
    """There is no default node, so nothing is left behind for the next test."""
    assert Node.current(required=False) is None
    with Node("a"):
        assert node_name(None) == "a"
        assert node_name("b") == node_name(Node("b")) == "b"
    assert node_name(None) is None


@pytest.mark.parametrize("name", ["", "..", "a/b", ".a", "a b", "a" * 64, "ä", "a\n", None, 3])
def test_bad_node_names_are_refused(name):
    """A node name with a slash, dots in front, spaces or too many characters is refused with the rule."""
    with pytest.raises(UsageError, match="cannot be the name of a node"):
        Node(name)
