"""Keys that neither verl nor rhyme reads: hydra adds them in silence, with ``+`` or from a user's YAML.

verl reads the keys of its default config, fields of its dataclasses, and keys that its source names in quotation marks
(``config.data.get("NAME")``). Sections that are empty by default and those of :data:`_FREE` are for other libraries;
other new sections on the top level are the user's.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, WARN, Check
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
    for place, name, value, taker in _unknown(mine, theirs, ""):
        key = f"{place}{name}"
        further = [path for path, _ in leaves(value)] if isinstance(value, Mapping) and value else [""]
        for given in (f"{name}.{path}".rstrip(".") for path in further):
            near = _nearest(place, given, theirs)
            set_to = OmegaConf.select(config, f"{place}{given}")
            same = near and OmegaConf.select(config, near) == set_to  # as interpolated
            if taker and (same or near is None):
                detail = f"{key} is no key of verl's {taker}, which refuses it in the workers"
                yield Check("keys", WARN if own_code else FAIL, detail, "drop it")
            elif near is None:
                unread += [key] if place else []
            elif not same:
                mine_alone = own_code or not (place or "." in given)  # a variable of the user's YAML
                status = WARN if mine_alone and not near.startswith(CONFIG_PATH) else FAIL
                detail = f"{place}{given} is not read: did you mean {near}?"
                yield Check("keys", status, detail, "correct the key, or drop it")
    if unread and not own_code:
        several = "are" if len(set(unread)) > 1 else "is"
        detail = f"{', '.join(sorted(set(unread)))} {several} read by neither verl nor rhyme"
        yield Check("keys", WARN, detail, "drop them, unless code of your own reads them")


def _unknown(mine: Mapping[str, Any], theirs: Mapping[str, Any], place: str) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the place, name and value of each key or section that verl does not read, and the dataclass that refuses it
    (empty: none)."""
    for name, value in mine.items():
        inside = theirs.get(name)
        if name in theirs:
            if isinstance(value, Mapping) and isinstance(inside, Mapping) and not _FREE.fullmatch(f"{place}{name}"):
                yield from _unknown(value, inside, f"{place}{name}.") if inside else ()
            continue
        target = str(mine.get("_target_")).rpartition(".")[2] if place.startswith("actor_rollout_ref.") else ""
        taker = target if target in _classes() else ""
        read = _fields(taker) if taker else _named("_target_" in theirs)
        if name not in read if place else not config_tree.is_near_rhyme(str(name)):
            yield place, str(name), value, taker


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    """Return the dataclasses that verl's workers make of their sections, by name; an import would take seconds."""
    files = (compose.verl_folder() / "workers" / "config").glob("*.py")
    statements = [each for file in files for each in ast.parse(file.read_text()).body]
    return {each.name: each for each in statements if isinstance(each, ast.ClassDef)}


def _fields(name: str) -> set[str]:
    """Return the fields of a dataclass and of its bases."""
    if (made := _classes().get(name)) is None:
        return set()
    own = {ast.unparse(each.target) for each in made.body if isinstance(each, ast.AnnAssign)}
    return own.union(*(_fields(ast.unparse(base)) for base in made.bases))


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
    if given == compose.ENGINE:
        return given
    ends = [key for key in keys if key.endswith(f".{given}")]
    return ends[0] if len(ends) == 1 else None
