"""Checks of files, classes and packages that a config names and verl loads in its workers, minutes after the start.

Python files are parsed, not run.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check, problems
from verl_rhyme.checks.preflight import user_code
from verl_rhyme.checks.preflight.compose import verl_folder
from verl_rhyme.checks.preflight.values import REWARD_MANAGERS
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.presets import leaves

#: Values of ``trainer.logger`` of verl 0.9.1, each with the module that it imports and the package of it.
LOGGERS: Mapping[str, tuple[str, str]] = {
    "console": ("", ""),
    "file": ("", ""),
    "wandb": ("wandb", "wandb"),
    "tracking": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "swanlab": ("swanlab", "swanlab"),
    "vemlp_wandb": ("volcengine_ml_platform", "volcengine-ml-platform"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "clearml": ("clearml", "clearml"),
    "trackio": ("trackio", "trackio"),
    "rl_insight": ("rl_insight", "rl-insight"),
}

#: What logs a run in, by logger: of each group one variable of the environment, or one file, with such a text. Without
#: it the logger asks at a terminal, which the trainer's process does not have.
_LOGINS: Mapping[str, tuple[tuple[Mapping[str, str], ...], str]] = {
    "wandb": (
        (
            {
                **dict.fromkeys(("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"), "."),
                "WANDB_MODE": "offline|disabled|dryrun",
                **dict.fromkeys(("$NETRC", "~/.netrc", "~/_netrc"), r"machine\s+\S*wandb|^\s*default"),
                **dict.fromkeys(("wandb/settings", "$WANDB_CONFIG_DIR/settings"), "api_key|base_url|mode"),
                "~/.config/wandb/settings": "api_key|base_url|mode",
            },
        ),
        "run `wandb login`, or export WANDB_API_KEY, or WANDB_MODE=offline",
    ),
    "swanlab": (
        (
            {
                "SWANLAB_API_KEY": ".",
                "SWANLAB_MODE": "local|offline|disabled",
                **dict.fromkeys((".swanlab/.netrc", "~/.swanlab/.netrc"), "machine"),
                **dict.fromkeys(("$SWANLAB_ROOT/.netrc", "$SWANLAB_SAVE_DIR/.netrc"), "machine"),
            },
        ),
        "run `swanlab login`, or export SWANLAB_API_KEY, or SWANLAB_MODE=local",
    ),
    "vemlp_wandb": (
        ({"VOLC_ACCESS_KEY_ID": "."}, {"VOLC_SECRET_ACCESS_KEY": "."}, {"MLP_TRACKING_REGION": "."}),
        "export VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY and MLP_TRACKING_REGION",
    ),
    "clearml": (
        (
            {
                **dict.fromkeys(("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN", "CLEARML_OFFLINE_MODE"), "."),
                **dict.fromkeys(("$CLEARML_CONFIG_FILE", "~/clearml.conf", "~/trains.conf"), "."),
            },
        ),
        "run `clearml-init`, or export CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or CLEARML_OFFLINE_MODE=1",
    ),
}

_ABSENT = object()

#: Agent loops that verl 0.9.1 registers.
AGENT_LOOPS = ("single_turn_agent", "tool_agent")

#: Parsers of calls in verl 0.9.1, which its ``tool_agent`` looks up in the workers.
PARSERS = ("hermes", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi", "deepseek_v4", "gemma4")

_MANAGER_FILE = "reward.reward_manager.module.path"

#: Keys of Python files that verl loads, each with the key of the object in it, if there is one.
_PYTHON = {
    "reward.custom_reward_function.path": "reward.custom_reward_function.name",
    _MANAGER_FILE: "reward.reward_manager.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "",
}

#: Arguments of verl's DAPO reward manager, its only manager that has any.
_ARGUMENTS, _PENALTY = "reward.reward_kwargs", "overlong_buffer_cfg"

#: Keys of verl's main config of earlier releases, which its V1 trainer does not read, and where they are now: those of
#: verl's ``migrate_legacy_reward_impl``, which that trainer does not call. The first that fits counts.
_MOVED = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.reward_kwargs": _ARGUMENTS,
    "reward_model.overlong_buffer": f"{_ARGUMENTS}.{_PENALTY}",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model": "",
    "reward_model": "reward.reward_model",
}

_AGENT, _TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"


def check(config: Any) -> Iterator[Check]:
    for key, name in _PYTHON.items():
        path, wanted = _text(config, key), _text(config, name) if name else ""
        if path and (key != _MANAGER_FILE or _text(config, "reward.reward_manager.source") == "importlib"):
            yield from list(_python(config, key, path, name, wanted)) or [Check(key, OK, path)]
    yield from _agent_loops(config)
    yield from _loggers(config)


def _python(config: Any, key: str, path: str, name_key: str, wanted: str) -> Iterator[Check]:
    """Check a Python file of the user: if its import fails, a run waits for the worker that loads it forever."""
    file = Path(path.removeprefix("file://"))
    if "://" in str(path) and not path.startswith("file://"):
        return
    if not file.is_file():
        yield Check(key, FAIL, f"no file {file.absolute()}", f"correct {key}")
        return
    source = file.read_bytes()
    try:
        tree = ast.parse(source, str(file))
    except (SyntaxError, ValueError) as error:
        yield Check(key, FAIL, f"{file}: {error}", f"correct the file, or {key}")
        return
    defined = set(_names(tree))
    if wanted and not {wanted, "*", "__getattr__"} & defined:
        yield Check(
            key,
            FAIL,
            f"{file} has no {wanted}{nearest(wanted, defined)}",
            f"set {name_key} to a name that the file defines",
        )
    runtime: Any = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env") or {}
    more = any(value for name, value in runtime.items() if name != "env_vars")
    own_packages = more or "PYTHONPATH" in (runtime.get("env_vars") or {}) or b"sys.path" in source
    for module in () if own_packages else _imports(tree):
        if _find(module) is None and not (Path(module).is_dir() or Path(f"{module}.py").is_file()):
            yield Check(
                key,
                FAIL,
                f"{file} imports {module}, which is not installed",
                "install it, or add its folder to PYTHONPATH",
            )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module may define, by whatever statement."""
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in each.names)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module imports unconditionally."""
    for each in tree.body:
        if isinstance(each, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield each.module.partition(".")[0]


def _find(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ModuleSpec(package, None, origin="a placeholder in sys.modules")


def reward(config: Any) -> Iterator[Check]:
    """Check that verl reads the keys of the reward, and that the arguments of its manager fit."""
    yield from _moved_keys(config)
    yield from _reward_arguments(config)


def _moved_keys(config: Any) -> Iterator[Check]:
    for section in dict.fromkeys(old.partition(".")[0] for old in _MOVED):
        for key, value in leaves(OmegaConf.select(config, section) or {}, f"{section}."):
            if value is not None:
                old, new = next(each for each in _MOVED.items() if f"{key}.".startswith(f"{each[0]}."))
                place = new + key.removeprefix(old)
                absent = OmegaConf.select(config, place, default=_ABSENT) is _ABSENT
                remedy = f"set {'+' * absent}{place}={value} instead" if new else "drop it"
                yield Check("reward", FAIL, f"{key} is not read by verl's V1 trainer", remedy)


def _reward_arguments(config: Any) -> Iterator[Check]:
    """Check the arguments of reward manager and function: verl asserts them in its workers, or reads none of them."""
    reward, function = config.reward, "reward.custom_reward_function"
    manager, given = reward.reward_manager, reward.get("reward_kwargs") or {}
    yield from problems(
        "reward",
        (
            OmegaConf.select(config, f"{function}.reward_kwargs") and not _text(config, f"{function}.path"),
            f"{function}.reward_kwargs without {function}.path: verl's own reward functions do not get them",
            f"set {function}.path, or drop them",
        ),
    )
    if manager.source != "register" or manager.name not in REWARD_MANAGERS:
        return  # the user's own manager reads what it likes
    for path, value in leaves(OmegaConf.to_container(reward), "reward."):  # type: ignore[arg-type]
        stray = re.search(rf"(?<=\.)(reward_kwargs|{_PENALTY}|max_resp_len)(\..*)?$", path)
        if stray and not path.startswith((f"{_ARGUMENTS}.", f"{function}.reward_kwargs.")):
            place = f"{_ARGUMENTS}.{stray[0].removeprefix('reward_kwargs.')}"
            yield Check("reward", FAIL, f"{path} is not read by verl", f"set +{place}={value} instead")
    if manager.name == "dapo":
        yield from _penalty(given.get(_PENALTY) or {}, given.get("max_resp_len"), config.data.max_response_length)
    elif given:
        yield Check(
            "reward",
            FAIL,
            f"{_ARGUMENTS} with reward.reward_manager.name={manager.name}, which does not read them",
            "set reward.reward_manager.name=dapo, or drop them",
        )


def _penalty(penalty: Any, most: int | None, longest: int) -> list[Check]:
    """Check DAPO's penalty of long responses: the last ``penalty.len`` of ``most`` tokens, of at most ``longest``."""
    key, limit = f"{_ARGUMENTS}.{_PENALTY}", f"{_ARGUMENTS}.max_resp_len"
    if not penalty.get("enable", bool(penalty)):
        return []
    if absent := [name for name in ("enable", "len", "penalty_factor", "log") if penalty.get(name) is None]:
        remedy = f"set {', '.join(f'+{key}.{name}' for name in absent)}"
        return [Check("reward", FAIL, f"{key} without {', '.join(absent)}", remedy)]
    if most is None or not 0 < penalty.len <= most:
        detail = f"{key}.len={penalty.len} with {limit}={'null' if most is None else most}"
        remedy = f"set {'+' * (most is None)}{limit}={longest}, and len from 1 to that"
        return [Check("reward", FAIL, detail, remedy)]
    useless = (
        most - penalty.len >= longest,
        f"{limit}={most}: no response of {longest} tokens gets the overlong penalty",
    )
    return problems("reward", (*useless, f"set {limit}={longest}"), status=WARN)


def _agent_loops(config: Any) -> Iterator[Check]:
    own, default = f"{_AGENT}.agent_loop_config_path", f"{_AGENT}.default_agent_loop"
    for key in (f"{_TURNS}.tool_config_path", own):
        if (path := _text(config, key)) and _config_file(path) is None:
            yield Check("agent loops", FAIL, f"{key}={path}: no file {Path(path).absolute()}", "correct the path")
    chosen = _text(config, default)
    if chosen and chosen not in AGENT_LOOPS and not _text(config, own):
        yield user_code.unknown("agent loops", default, chosen, AGENT_LOOPS, config)
    if chosen == "tool_agent" and (parser := _text(config, key := f"{_TURNS}.format")) not in PARSERS:
        yield user_code.unknown("agent loops", key, parser, PARSERS, config)


def _config_file(path: str) -> Path | None:
    """Return the file that verl's ``resolve_config_path`` finds: below the working folder or verl's own."""
    return next((root / path for root in (Path(), verl_folder().parent) if (root / path).is_file()), None)


def _loggers(config: Any) -> Iterator[Check]:
    """Check that the loggers of ``trainer.logger`` exist and are installed; verl imports them after the engines run."""
    given = config.trainer.get("logger") or []
    for name in [given] if isinstance(given, str) else given:
        if name not in LOGGERS:
            yield user_code.unknown("loggers", "trainer.logger", str(name), tuple(LOGGERS), config)
            continue
        module, package = LOGGERS[name]
        found = _find(module) if module else None
        lacks = {}
        if module and (found is None or found.origin is None):  # a folder of that name (wandb's logs) is no package
            lacks[f"{package} is not installed"] = f"pip install {package}"
        groups, remedy = _LOGINS.get("wandb" if name == "tracking" else name, ((), ""))
        env = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
        if not all(any(_holds(place, text, env) for place, text in group.items()) for group in groups):
            lacks["this machine has no login for it"] = remedy
        if lacks:
            detail = f"trainer.logger={name}: {', and '.join(lacks)}"
            yield Check("loggers", FAIL, detail, f"{'; '.join(lacks.values())}; or drop it from trainer.logger")


def _holds(place: str, text: str, env: Mapping[str, Any]) -> bool:
    """Whether a variable of the environment, or a file that this user may read, has a text; ``env`` are variables of
    Ray's workers."""
    if place.isidentifier():
        return bool(re.search(text, str(env.get(place) or os.environ.get(place) or "")))
    with suppress(OSError):
        # os.path's: a user without a home folder has none of these files, either
        file = Path(os.path.expanduser(os.path.expandvars(place)))
        return bool(re.search(text, file.read_text(errors="replace"), re.M))
    return False


def _text(config: Any, key: str) -> str:
    return str(OmegaConf.select(config, key) or "")
