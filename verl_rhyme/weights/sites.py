"""Distribution tree of a version: it crosses the slow link once per site, then passes from node to node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hop:
    """A source node, and whether it is at another site, across the slow link."""

    node: str
    remote: bool


def tree(source: str, nodes: Iterable[str], sites: Mapping[str, str | None]) -> dict[str, list[Hop]]:
    """Return the sources that each node except ``source`` tries, in order; senders come before their receivers.

    Within a site (nodes without one form a site) each node passes a version on to two others, a binary tree. The root
    is the source at its own site; at other sites it is the first node, which alone fetches from the source. If its
    parent is gone, a node tries the node before it in its site, and the source last.
    """
    home = sites.get(source)
    chains: dict[str | None, list[str]] = {home: [source]}
    for node in sorted(set(nodes) - {source}):
        chains.setdefault(sites.get(node), []).append(node)
    hops: dict[str, list[Hop]] = {}
    for site, chain in chains.items():
        for place, node in enumerate(chain):
            before = [chain[(place - 1) // 2], chain[place - 1]] if place else []
            near = [each for each in dict.fromkeys(before[:1] if site == home else before) if each != source]
            hops[node] = [*(Hop(each, False) for each in near), Hop(source, site != home)]
    del hops[source]
    return hops
