"""The distribution tree of a version."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.weights.sites import Hop, tree


@given(
    nodes=st.dictionaries(st.sampled_from("bcdefghijklm"), st.sampled_from(["x", "y", "z", None])),
    home=st.sampled_from(["x", None]),
)
def test_a_version_goes_to_each_site_once(nodes, home):
    sources = tree("a", nodes, {**nodes, "a": home})
    assert sources.keys() == nodes.keys()
    far = [node for node, hops in sources.items() if hops[0].remote]
    assert sorted(str(nodes[node]) for node in far) == sorted({str(s) for s in nodes.values() if s != home})
    sends = Counter(hops[0].node for hops in sources.values() if not hops[0].remote)
    assert all(count <= 2 for count in sends.values())
    order = ["a", *sources]
    for node, hops in sources.items():
        assert hops[-1] == Hop("a", nodes[node] != home), "the last resort is not the source"
        assert all(order.index(hop.node) < order.index(node) for hop in hops), "the hops form a cycle"
        assert all(nodes[hop.node] == nodes[node] and not hop.remote for hop in hops[:-1])
