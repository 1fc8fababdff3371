"""From whom each node fetches a version: each site once over the slow link, then node by node within it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hop:
    """A node to fetch from, and whether that is over the slow link."""

    node: str
    far: bool


def tree(source: str, nodes: Iterable[str], sites: Mapping[str, str | None]) -> dict[str, list[Hop]]:
    """Whom to ask, in turn: the next where one is gone.

    Within a site each node passes a version on to two others (a binary tree). Its root is the source at home, and
    elsewhere the site's first node, which alone asks the source. Where a node is gone, those that it would have sent
    to ask the node before them in their site, and the source last.

    Args:
        source: The node that has the version.
        nodes: Those that need it.
        sites: Of a node; nodes without one are at one site.

    Returns:
        For each node but the source, in an order in which whoever sends comes before those that it sends to.
    """
    home = sites.get(source)
    chains: dict[str | None, list[str]] = {home: [source]}
    for node in sorted(set(nodes) - {source}):
        chains.setdefault(sites.get(node), []).append(node)
    asked: dict[str, list[Hop]] = {}
    for site, chain in chains.items():
        for place, node in enumerate(chain):
            before = [chain[(place - 1) // 2], chain[place - 1]] if place else []
            near = [each for each in dict.fromkeys(before[:1] if site == home else before) if each != source]
            asked[node] = [*(Hop(each, False) for each in near), Hop(source, site != home)]
    del asked[source]
    return asked
