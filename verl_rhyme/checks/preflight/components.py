"""Checks of files, classes and packages that a config names and verl loads in its workers, minutes after the start.

Python files are parsed, not run.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, OK, Check
from verl_rhyme.checks.preflight import user_code
from verl_rhyme.checks.preflight.compose import verl_folder
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

#: Agent loops that verl 0.9.1 registers.
AGENT_LOOPS = ("single_turn_agent", "tool_agent")

#: Keys of Python files that verl loads, each with the key of the object in it, if there is one.
_PYTHON = {
    "reward.custom_reward_function.path": "reward.custom_reward_function.name",
    "reward.reward_manager.module.path": "reward.reward_manager.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "",
}

#: Sections of verl's main config of earlier releases, which its V1 trainer does not read, and where they are now.
_MOVED = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model, reward.reward_manager or reward.num_workers",
    "sandbox_fusion": "reward.sandbox_fusion",
}

_AGENT, _TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"


def check(config: Any) -> Iterator[Check]:
    yield from _moved_keys(config)
    for key, name in _PYTHON.items():
        path, wanted = _text(config, key), _text(config, name) if name else ""
        managers = key.startswith("reward.reward_manager")
        if path and not (managers and _text(config, "reward.reward_manager.source") != "importlib"):
            problems = list(_python(config, key, path, name, wanted))
            yield from problems or [Check(key, OK, path)]
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
        detail = f"{file} has no {wanted}{nearest(wanted, defined)}"
        yield Check(key, FAIL, detail, f"set {name_key} to a name that the file defines")
    runtime: Any = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env") or {}
    more = any(value for name, value in runtime.items() if name != "env_vars")
    own_packages = more or "PYTHONPATH" in (runtime.get("env_vars") or {}) or b"sys.path" in source
    for module in () if own_packages else _imports(tree):
        if _find(module) is None and not (Path(module).is_dir() or Path(f"{module}.py").is_file()):
            detail = f"{file} imports {module}, which is not installed"
            yield Check(key, FAIL, detail, "install it, or add its folder to PYTHONPATH")


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


def _moved_keys(config: Any) -> Iterator[Check]:
    for section, place in _MOVED.items():
        for key, value in leaves(OmegaConf.select(config, section) or {}, f"{section}."):
            if value is not None:
                yield Check("reward", FAIL, f"{key} is not read by verl's V1 trainer", f"set it below {place} instead")


def _agent_loops(config: Any) -> Iterator[Check]:
    own, default = f"{_AGENT}.agent_loop_config_path", f"{_AGENT}.default_agent_loop"
    for key in (f"{_TURNS}.tool_config_path", own):
        path = _text(config, key)
        if path and _config_file(path) is None:
            yield Check("agent loops", FAIL, f"{key}={path}: no file {Path(path).absolute()}", "correct the path")
    chosen = _text(config, default)
    if chosen and chosen not in AGENT_LOOPS and not _text(config, own):
        yield user_code.unknown("agent loops", default, chosen, AGENT_LOOPS, config)


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
        if module and (found is None or found.origin is None):  # a folder of that name (wandb's logs) is no package
            detail = f"trainer.logger={name}: {package} is not installed"
            yield Check("loggers", FAIL, detail, f"pip install {package}, or drop it from trainer.logger")


def _text(config: Any, key: str) -> str:
    return str(OmegaConf.select(config, key) or "")
