"""Composition of the config of ``python -m verl.trainer.main_ppo ARGS``, without running the command.

The module calls hydra's argument parser, search path and composer, as verl's ``@hydra.main`` does. Hydra's compose API
takes no ``--config-dir`` and resolves a relative ``--config-path`` from the caller's file, hence the imports of
``_internal``. ``tests/contract/test_preflight.py`` compares the result with the output of verl's command.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import compute_search_path_dir, create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, config_tree, options

_ABSENT = object()
#: Config group of verl's training engine, which leaves no key of its own in the config.
ENGINE = "model_engine"
#: File of verl's ``@hydra.main``, and the config path and name that it sets.
MAIN, _CONFIG_PATH, _CONFIG_NAME = "trainer/main_ppo.py", "config", "ppo_trainer"


def compose(arguments: Sequence[str]) -> DictConfig:
    """Return the resolved config of arguments of ``python -m verl.trainer.main_ppo``, without hydra's own node.

    The command's program may stand before them. All are optional: ``--config-path`` (relative to verl's
    ``main_ppo.py``, as with verl), ``--config-name``, ``--config-dir``, overrides. Raises ConfigError with hydra's
    message in one line, with the nearest key.
    """
    if (begin := program_ends(arguments)) is not None:
        arguments = arguments[begin:]
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would exit
    args = parser.parse_intermixed_args(list(arguments))
    if args.multirun:
        raise ConfigError("--multirun is not supported: pass the overrides of a single run")
    main = verl_folder() / MAIN
    state = GlobalHydra.instance(), HydraConfig.instance().cfg
    previous = state[0].hydra
    try:
        folder = compute_search_path_dir(str(main), None, args.config_path or _CONFIG_PATH)
        if folder is not None and "://" not in folder and not os.path.isdir(folder):
            raise ConfigError(f"--config-path {args.config_path}: no such folder {folder}")
        search = create_config_search_path(folder)
        if args.config_dir is not None:
            folder = os.path.abspath(args.config_dir)
            if not os.path.isdir(folder):
                raise ConfigError(f"--config-dir {args.config_dir}: no such folder")
            search.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        state[0].clear()
        hydra = Hydra.create_main_hydra2(main.stem, search)
        name = args.config_name or _CONFIG_NAME
        with _packages_of_verl():
            try:
                config = hydra.compose_config(name, args.overrides, RunMode.RUN, with_log_configuration=False)
            except HydraException as error:
                raise ConfigError(message(error, name, args.overrides)) from error
        HydraConfig.instance().set_config(config)  # ${hydra:...} reads it
        config = hydra.get_sanitized_cfg(config, "job")
        OmegaConf.resolve(config)
        if missing := [key for key in ("actor_rollout_ref", "data", "trainer") if key not in config]:
            raise ConfigError(
                f"--config-name {name}: no {', '.join(missing)} in it; start its defaults with `- {_CONFIG_NAME}`"
            )
        return config
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_one_line(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config-name {name}: the file, or a file of its defaults, is not UTF-8 text: {error}"
        ) from error
    finally:
        state[0].hydra = previous
        HydraConfig.instance().cfg = state[1]


def program_ends(arguments: Sequence[str]) -> int | None:
    """Return where the arguments of ``python -m ...main_ppo`` or ``python .../main_ppo.py`` begin; ``None`` without."""
    for i, (before, each) in enumerate(itertools.pairwise(["", *arguments])):
        if (before == "-m" and each.endswith("main_ppo")) or ("=" not in each and each.endswith("main_ppo.py")):
            return i + 1
    return None


@functools.cache
def defaults(strategy: str) -> dict[str, Any]:
    """Return verl's unresolved default config for an ``actor.strategy``, from the file that verl generates."""
    folder = verl_folder() / "trainer" / _CONFIG_PATH
    own = folder / f"_generated_ppo_{strategy}_trainer.yaml"  # FSDP has no file of its own
    found = own if own.is_file() else folder / f"_generated_{_CONFIG_NAME}.yaml"
    return OmegaConf.to_container(OmegaConf.load(found), resolve=False)  # type: ignore[return-value]


def message(error: HydraException, name: str, overrides: Sequence[str]) -> str:
    """Return an error of composition in one line; for an unknown key, with the nearest known key."""
    text = _one_line(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {text}; quote a value with special characters: 'KEY=\"VALUE\"'"
    if text.endswith(f"Could not load '{_CONFIG_NAME}'"):  # --config-path replaces verl's config folder
        return (
            f"{text}; add `hydra: {{searchpath: [pkg://verl.trainer.config]}}` to {name}.yaml, or pass its folder as "
            "--config-dir"
        )
    for override in overrides:  # hydra proposes to add the group
        name, _, chosen = override.lstrip("+~").partition("=")
        if name != "rhyme" and config_tree.is_near_rhyme(name):
            return f"{override}: unknown key; did you mean +rhyme={chosen}?"
    key = getattr(error.__cause__, "full_key", None)
    wrong = [override for override in overrides if re.match(rf"{re.escape(str(key))}[.=@]", override)]
    if not (key and wrong):
        return text
    wrong.sort(key=lambda each: not each.startswith(f"{key}."))  # before the choice of a group of that name
    given = wrong[0].partition("=")[0]
    place, ours, option = given.partition("rhyme.")
    if ours and set(place.split(".")) <= {"", *CONFIG_PATH.split(".")} and f"{place}rhyme" != CONFIG_PATH:
        return f"{wrong[0]}: unknown key; did you mean {CONFIG_PATH}.{option}?"
    if ours and CONFIG_PATH.startswith(str(key)):
        return f"{wrong[0]}: without a preset there are no options of rhyme: add +rhyme=histospec"
    if given in {each.name for each in options()}:
        return f"{wrong[0]}: unknown key; did you mean {CONFIG_PATH}.{given}?"
    parent, _, leaf = str(key).rpartition(".")
    if leaf == ENGINE:
        return f"{wrong[0]}: unknown key; did you mean {wrong[0].removeprefix(f'{parent}.')}?"
    known = OmegaConf.create(defaults("megatron" if f"{ENGINE}=megatron" in overrides else "fsdp"))
    OmegaConf.update(known, CONFIG_PATH, RhymeConfig().to_dict(), force_add=True)
    section = OmegaConf.select(known, parent) if parent else known
    names = map(str, section) if OmegaConf.is_dict(section) else ()
    near = difflib.get_close_matches(leaf, list(names), n=1, cutoff=0.5)
    below = re.split("[=@]", wrong[0].removeprefix(str(key)), maxsplit=1)[0]
    found = ".".join(filter(None, [parent, *near])) + below
    if not near or OmegaConf.select(known, found, default=_ABSENT) is _ABSENT:
        return text
    return f"{wrong[0]}: unknown key; did you mean {found}?"


def _one_line(error: BaseException) -> str:
    cause = error.__cause__
    texts = [str(error), *([str(cause)] if isinstance(cause, OmegaConfBaseException) else [])]
    lines = [line.strip().rstrip(".;") for text in texts for line in text.splitlines()]
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(("full_key", "object_type")))
    return "; ".join(kept).replace(":; ", ": ")  # after a heading, such as "Available options in 'rhyme':"


@contextlib.contextmanager
def _packages_of_verl() -> Iterator[None]:
    """Let hydra find ``pkg://verl.trainer.config`` without running verl, whose import takes seconds."""
    added = []
    for name in ("verl", "verl.trainer", "verl.trainer.config"):
        # the parents are in sys.modules by now, so that find_spec imports nothing
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            added.append(name)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def verl_folder() -> Path:
    """Return verl's folder; raises ConfigError if it is not installed."""
    found = importlib.util.find_spec("verl")  # imports nothing
    if found is None or not found.submodule_search_locations:
        raise ConfigError("verl is not installed, but the config needs verl's defaults: install verl==0.9.1")
    return Path(found.submodule_search_locations[0])


def _refuse(message: str) -> None:
    raise ConfigError(f"arguments after --: {message}; pass the arguments of `python -m verl.trainer.main_ppo`")
