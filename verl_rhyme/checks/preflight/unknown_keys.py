"""Keys that neither verl nor rhyme reads: hydra adds them in silence, with ``+`` or from a user's YAML.

verl reads the keys of its default config, fields of its dataclasses, and keys that its source names in quotation marks
(``config.data.get("NAME")``). Sections that are empty by default and those of :data:`_FREE` are for other libraries;
other new sections on the top level are the user's.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, WARN, Check, problems
from verl_rhyme.checks.preflight import compose, user_code
from verl_rhyme.config import CONFIG_PATH, RhymeConfig, config_tree, options
from verl_rhyme.config.presets import leaves

#: Sections with defaults whose further keys go to Ray, TransferQueue, Nsight, Megatron or to a teacher of any name, and
#: those of an earlier verl (:func:`.components.reward`).
_FREE = re.compile(
    r"ray_kwargs|transfer_queue|.*\.(override_\w+|\w+_options|teacher_models)|"
    r"reward_model|custom_reward_function|sandbox_fusion"
)

_QUOTED = re.compile(r"""["']([A-Za-z_][\w.]*)["']""")
_FIELD = re.compile(r"^    ([a-z_]\w*): ", re.M)
_LIKE = 0.81  # difflib's ratio; my_logger is not logger


def check(config: Any, rhyme: RhymeConfig | None) -> Iterator[Check]:
    """Check that something reads each key of verl's resolved config; without ``rhyme`` nothing is checked."""
    if rhyme is None:
        return
    mine: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    theirs = compose.defaults(str(OmegaConf.select(config, "actor_rollout_ref.actor.strategy")))
    own_code, unread = user_code.reads_config(config), []
    for place, name, value in _unknown(mine, theirs, ""):
        further = [path for path, _ in leaves(value)] if isinstance(value, Mapping) and value else [""]
        for given in (f"{name}.{path}".rstrip(".") for path in further):
            near = _nearest(place, given, theirs)
            if near is None:
                unread += [f"{place}{name}"] if place else []
            elif OmegaConf.select(config, near) != OmegaConf.select(config, f"{place}{given}"):  # as interpolated
                mine_alone = own_code or not (place or "." in given)  # a variable of the user's YAML
                yield Check(
                    "keys",
                    WARN if mine_alone and not near.startswith(CONFIG_PATH) else FAIL,
                    f"{place}{given} is not read: did you mean {near}?",
                    "correct the key, or drop it",
                )
    yield from problems(
        "keys",
        (
            unread and not own_code,
            f"{', '.join(sorted(set(unread)))} are read by neither verl nor rhyme",
            "drop them, unless code of your own reads them",
        ),
        status=WARN,
    )


def _unknown(mine: Mapping[str, Any], theirs: Mapping[str, Any], place: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the place, name and value of each key or section that verl does not read."""
    for name, value in mine.items():
        inside = theirs.get(name)
        if name in theirs:
            if isinstance(value, Mapping) and isinstance(inside, Mapping) and not _FREE.fullmatch(f"{place}{name}"):
                yield from _unknown(value, inside, f"{place}{name}.") if inside else ()
        elif name not in _named("_target_" in theirs) if place else not config_tree.is_near_rhyme(str(name)):
            yield place, str(name), value


@functools.cache
def _named(fields: bool) -> frozenset[str]:
    """Return the names that verl's source quotes, and for sections of its dataclasses their ``fields``."""
    texts = [file.read_text("utf-8") for file in compose.verl_folder().rglob("*.py")]
    names = {part for text in texts for name in _QUOTED.findall(text) for part in name.split(".")}
    return frozenset(names.union(*map(_FIELD.findall, texts) if fields else ()))


def _nearest(place: str, given: str, theirs: Mapping[str, Any]) -> str | None:
    """Return the key that ``given`` below ``place`` is meant to be: one of this section, of rhyme, or elsewhere."""
    name, _, below = given.partition(".")
    keys = [key for key, _ in leaves(theirs)]
    section = functools.reduce(lambda tree, part: tree[part], place.split(".")[:-1], theirs)
    if found := difflib.get_close_matches(name.lower(), list(section), n=1, cutoff=_LIKE):
        near = f"{place}{found[0]}.{below}".rstrip(".")
        if place or near in keys:
            return near
    ours = [each.name for each in options() if each.name != "enable"]
    if found := difflib.get_close_matches(given.lower(), ours, n=1, cutoff=_LIKE):
        return f"{CONFIG_PATH}.{found[0]}"
    ends = [key for key in keys if key.endswith(f".{given}")]
    return ends[0] if len(ends) == 1 else None
