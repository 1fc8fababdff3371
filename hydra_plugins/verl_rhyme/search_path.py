"""Hydra plugin that finds ``+rhyme=histospec`` from any command, primary config and working directory."""

import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_rhyme.checks import resolvers

_GROUPS = Path(__file__).parents[2] / "verl_rhyme" / "conf"


class VerlRhymeSearchPath(SearchPathPlugin):
    """Search path plugin that appends verl-rhyme's config groups and registers their interpolations."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        resolvers.register()
        search_path.append(provider="verl-rhyme", path=f"file://{_GROUPS}")
        if "verl" in sys.modules:  # releases of verl without plugins, which the check of the versions refuses
            from verl_rhyme import patches

            patches.apply(patches.BEFORE_RAY)
