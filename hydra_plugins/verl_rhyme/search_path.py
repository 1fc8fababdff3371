"""Lets hydra find ``+rhyme=histospec`` from any command, any primary config and any working directory."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_rhyme.checks import resolvers

_GROUPS = Path(__file__).parents[2] / "verl_rhyme" / "conf"


class VerlRhymeSearchPath(SearchPathPlugin):
    """Appends the config groups that ship with verl-rhyme, and registers what they interpolate."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        resolvers.register()
        search_path.append(provider="verl-rhyme", path=f"file://{_GROUPS}")
