"""Checks of files, classes and packages that a config names and verl loads in its workers, minutes after the start.

Python files are parsed, not run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight import user_code
from verl_rhyme.checks.preflight.datasets import REWARD_MANAGERS
from verl_rhyme.config.checks import nearest

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

#: Arguments by name with which verl's reward managers call a reward function.
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

#: Keys of Python files that verl loads, each with the key of the object in it, if there is one.
_PYTHON = {
    "reward.reward_manager.module.path": "reward.reward_manager.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "",
}

#: Keys of verl's main config of earlier releases, which its V1 trainer does not read, and where they are now.
_LEGACY = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.model.path": "reward.reward_model.model_path",
    "sandbox_fusion": "reward.sandbox_fusion",
}

_AGENT, _TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
_REWARD = "reward.custom_reward_function"
_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def check(config: Any) -> Iterator[Check]:
    yield from _legacy_keys(config)
    yield from reward_function(config)
    for key, name in _PYTHON.items():
        path, wanted = _text(config, key), _text(config, name) if name else ""
        source = OmegaConf.select(config, "reward.reward_manager.source")
        if path and (not key.startswith("reward.") or source == "importlib"):
            found = _python(config, key, path, name, wanted)
            if isinstance(found, Check):
                yield found
    yield from _agent_loops(config)
    yield from _loggers(config)
    yield from _engine_options(config)


def reward_function(config: Any) -> Iterator[Check]:
    """Check that verl can load and call the reward function; otherwise, a run waits for its reward workers forever."""
    path, wanted = _text(config, f"{_REWARD}.path"), _text(config, f"{_REWARD}.name")
    if not path:
        return
    found = _python(config, f"{_REWARD}.path", path, f"{_REWARD}.name", wanted)
    if isinstance(found, Check):
        yield found
        return
    manager = OmegaConf.select(config, "reward.reward_manager") or {}
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list:
        given = {*REWARD_ARGUMENTS, *(OmegaConf.select(config, f"{_REWARD}.reward_kwargs") or {})}
        if OmegaConf.select(config, "reward.reward_model.enable"):
            given |= {"reward_router_address", "reward_model_tokenizer"}
        if manager.get("source", "register") == "register" and manager.get("name", "naive") in REWARD_MANAGERS:
            takes = found.args
            named = [each.arg for each in (*takes.args, *takes.kwonlyargs)]
            optional = [each.arg for each in takes.args[len(takes.args) - len(takes.defaults) :]]
            optional += [arg.arg for arg, each in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if each]
            lacks = [name for name in REWARD_ARGUMENTS if name not in named and takes.kwarg is None]
            more = [name for name in named if name not in given and name not in optional]
            if lacks or more:
                calls = f"verl calls it with {', '.join(REWARD_ARGUMENTS)}"
                wrong = f"has no argument {', '.join(lacks)}" if lacks else f"requires {', '.join(more)}"
                remedy = f"write def {wanted}({', '.join(REWARD_ARGUMENTS)}, **kwargs)"
                yield Check("reward function", FAIL, f"{path}: {wanted} {wrong}; {calls}", remedy)
                return
    yield Check("reward function", OK, path)


def _python(config: Any, key: str, path: str, name_key: str, wanted: str) -> Check | ast.AST | None:
    """Return the problem of an object of a Python file that verl loads; else its definition, if it has one."""
    check = "reward function" if key.startswith(_REWARD) else key
    if path.startswith("pkg://"):
        package = path.removeprefix("pkg://").replace("/", ".").partition(".")[0]
        if _importable(package):
            return None
        return Check(check, FAIL, f"{key}={path}: no module {package}", "install it, or add its folder to PYTHONPATH")
    file = Path(path.removeprefix("file://"))
    if "://" in str(path) and not path.startswith("file://"):
        return None
    if str(file).startswith("~"):
        return Check(check, FAIL, f"{key}={path}: verl does not expand ~", f"set {key}={file.expanduser()}")
    if not file.is_file():
        return Check(check, FAIL, f"no file {file.absolute()}", f"correct {key}")
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        where, why = ("", str(error))
        if isinstance(error, SyntaxError):
            where, why = f", line {error.lineno}", error.msg
        return Check(check, FAIL, f"{file}{where}: {why}", f"correct the file, or {key}")
    future = any(
        isinstance(each, ast.ImportFrom) and each.module == "__future__" and each.names[0].name == "annotations"
        for each in tree.body
    )
    defined: dict[str, ast.AST] = {}
    for each in _top_level(tree.body):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[each.name] = each
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            defined |= {target.id: each for target in targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.partition(".")[0]: each for alias in each.names}
        decorators = map(ast.unparse, each.decorator_list) if isinstance(each, ast.ClassDef) else ()
        if future and any(text.partition("(")[0].endswith("dataclass") for text in decorators):
            detail = f"{file}, line {each.lineno}: a dataclass with `from __future__ import annotations` fails in verl"
            return Check(check, FAIL, f"{detail}, which loads the file without a module name", "drop that import")
    if wanted and wanted not in defined and not {"*", "__getattr__"} & {*defined}:
        known = [name for name, each in defined.items() if not isinstance(each, ast.Import | ast.ImportFrom)]
        near = nearest(wanted, known)
        listed = f"; it defines {', '.join(known[:6])}" if known and not near else ""
        return Check(check, FAIL, f"{file} has no {wanted}{near}{listed}", f"set {name_key} to one that it defines")
    if not _adds_packages(config) and not re.search(rb"sys\.path|addsitedir", file.read_bytes()):
        for module, line in _imports(tree):
            if not _importable(module):
                detail = f"{file}, line {line}: no module {module}, which it imports"
                return Check(check, FAIL, detail, "install it, or add its folder to PYTHONPATH")
    return defined.get(wanted)


def _adds_packages(config: Any) -> bool:
    """Whether Ray's workers may have more packages than this process."""
    runtime: Any = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env") or {}
    ways = ("pip", "uv", "conda", "py_modules", "working_dir", "py_executable", "container", "image_uri")
    return any(map(runtime.get, ways)) or "PYTHONPATH" in (runtime.get("env_vars") or {})


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for each in body:
        yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(each, field, ()):
                    yield from _top_level(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for each in tree.body:
        if isinstance(each, ast.Import):
            yield from ((alias.name.partition(".")[0], each.lineno) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield each.module.partition(".")[0], each.lineno


def _importable(package: str) -> bool:
    """Whether a top package is installed, or in the working folder, which ``python -m`` adds to the path."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = True  # a placeholder in sys.modules
    return found or Path(package).is_dir() or Path(f"{package}.py").is_file()


def _installed(package: str) -> bool:
    """Whether a package is installed; a folder of that name (wandb's logs) is none."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return True
    return found is not None and found.origin is not None


def _legacy_keys(config: Any) -> Iterator[Check]:
    for section in ("custom_reward_function", "reward_model", "sandbox_fusion"):
        tree = OmegaConf.select(config, section)
        given = _leaves(OmegaConf.to_container(tree), f"{section}.") if OmegaConf.is_dict(tree) else ()
        for key in given:
            new = _LEGACY.get(key) or f"{_LEGACY[section]}{key.removeprefix(section)}"
            yield Check("reward", FAIL, f"{key} is not read by verl's V1 trainer", f"set {new} instead")


def _leaves(tree: Any, where: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where}{name}.")
        elif value is not None:
            yield f"{where}{name}"


def _agent_loops(config: Any) -> Iterator[Check]:
    for key, part in ((f"{_TURNS}.tool_config_path", "tools"), (f"{_AGENT}.agent_loop_config_path", None)):
        path = _text(config, key)
        if not path:
            continue
        file = _config_file(path)
        if file is None:
            yield Check("agent loops", FAIL, f"{key}={path}: no file {Path(path).absolute()}", "correct the path")
            return
        try:
            entries = OmegaConf.to_container(OmegaConf.load(file))
            entries = entries[part] if part else entries  # type: ignore[index,call-overload]
            names = [each["name"] if part is None else each["class_name"] for each in entries]  # type: ignore
        except (OSError, OmegaConfBaseException, ValueError, TypeError, KeyError) as error:
            shape = "tools: [{class_name, config, tool_schema}]" if part else "[{name, _target_}]"
            yield Check("agent loops", FAIL, f"{file}: {error!r}", f"write it as {shape}")
            return
        except Exception as error:  # of the YAML parser
            yield Check("agent loops", FAIL, f"{file}: {str(error).splitlines()[0]}", "correct the file")
            return
        for each, entry in zip(names, entries, strict=True):  # type: ignore[arg-type]
            target = str(each if part else entry.get("_target_", ""))  # type: ignore[union-attr]
            if not _importable(target.partition(".")[0]):
                detail = f"{file}: {target} cannot be imported: no module {target.partition('.')[0]}"
                yield Check("agent loops", FAIL, detail, "install it, or add its folder to PYTHONPATH")
    default = _text(config, f"{_AGENT}.default_agent_loop")
    own = _text(config, f"{_AGENT}.agent_loop_config_path")
    known = [*AGENT_LOOPS, *(names if own else ())]  # the last file read is that of agent loops
    if default and default not in known:
        key, remedy = f"{_AGENT}.default_agent_loop", f"name its file in {_AGENT}.agent_loop_config_path"
        yield user_code.unknown("agent loops", key, default, tuple(known), config, user_code.AGENTS, remedy)


def _config_file(path: str) -> Path | None:
    """Return the file that verl's ``resolve_config_path`` finds: below the working folder or verl's own."""
    spec = importlib.util.find_spec("verl")
    roots = [Path(), *(Path(place).parent for place in (spec and spec.submodule_search_locations) or ())]
    return next((root / path for root in roots if (root / path).is_file()), None)


def _loggers(config: Any) -> Iterator[Check]:
    """Check that the loggers of ``trainer.logger`` exist and are installed; verl imports them after the engines run."""
    given = config.trainer.get("logger") or []
    for name in [given] if isinstance(given, str) else given:
        if name not in LOGGERS:
            yield user_code.unknown("loggers", "trainer.logger", str(name), tuple(LOGGERS), config, user_code.TRAINER)
            continue
        module, package = LOGGERS[name]
        if module and not _installed(module):
            detail = f"trainer.logger={name}: {package} is not installed"
            yield Check("loggers", FAIL, detail, f"pip install {package}, or drop it from trainer.logger")


def _engine_options(config: Any) -> Iterator[Check]:
    """Check the names of options for vLLM, whose command line ends the engine for an unknown one."""
    given: Any = OmegaConf.select(config, _ENGINE) or {}
    known = _vllm_options() if given else set()
    for name in given if known else ():
        option = str(name).replace("-", "_").partition(".")[0].removeprefix("no_")
        if not any(each.startswith(option) for each in known):
            near = nearest(option, known)
            detail = f"{_ENGINE}.{name}: vLLM has no such option{near}"
            yield Check("engine options", FAIL if near else WARN, detail, "correct the name, or drop it")


@functools.cache
def _vllm_options() -> set[str]:
    """Return the names of all options of `vllm serve`, by its source; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    known = set()
    for place in (spec and spec.submodule_search_locations) or ():
        for file in ("engine/arg_utils.py", "entrypoints/openai/cli_args.py"):
            for each in ast.parse((Path(place) / file).read_bytes()).body:
                if isinstance(each, ast.ClassDef) and each.name.endswith("Args"):
                    fields = (field.target for field in each.body if isinstance(field, ast.AnnAssign))
                    known |= {field.id for field in fields if isinstance(field, ast.Name)}
    return known


def _text(config: Any, key: str) -> str:
    return str(OmegaConf.select(config, key) or "")
