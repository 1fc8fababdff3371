"""Hydra plugin that finds ``+rhyme=histospec`` from any command, primary config and working directory."""

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_rhyme.checks import resolvers
from verl_rhyme.config import CONFIG_PATH, RhymeConfig
from verl_rhyme.config.presets import GROUPS


class VerlRhymeSearchPath(SearchPathPlugin):
    """Search path plugin that appends verl-rhyme's config groups and registers its options and interpolations."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        resolvers.register()
        options = RhymeConfig().to_dict()
        ConfigStore.instance().store("options", options, "rhyme/parts", CONFIG_PATH, provider="verl-rhyme")
        search_path.append(provider="verl-rhyme", path=f"file://{GROUPS}")
        if "verl" in sys.modules:  # releases of verl without plugins, which the check of the versions refuses
            from verl_rhyme import patches

            patches.apply(patches.BEFORE_RAY)
