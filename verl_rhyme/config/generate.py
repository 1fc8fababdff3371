"""Writes what is generated from the options: the YAML groups of ``conf/rhyme`` and ``docs/options.md``.

``python -m verl_rhyme.config.generate`` in a checkout, after a change of an option or a preset; a test compares.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH
from verl_rhyme.config.listing import Option, options, sections
from verl_rhyme.config.presets import PRESETS, WHAT, verl_keys

_WIDTH = 120
_COMMAND = "python -m verl_rhyme.config.generate"


def files() -> dict[str, str]:
    """Every generated file's text, by its path in the repository."""
    groups = {f"verl_rhyme/conf/rhyme/{preset}.yaml": group(preset) for preset in PRESETS}
    return {**groups, "docs/options.md": document()}


# ---- YAML groups ----


class _Tree(dict[str, Any]):
    """A mapping of a YAML file; values have comments."""

    def __init__(self) -> None:
        super().__init__()
        self.comments: dict[str, list[str]] = {}

    def put(self, path: str, value: Any, *comments: str) -> None:
        name, _, rest = path.partition(".")
        if rest:
            self.setdefault(name, _Tree()).put(rest, value, *comments)
        else:
            self[name] = value
            self.comments[name] = [comment for comment in comments if comment]

    def lines(self, indent: str = "") -> Iterator[str]:
        for name, value in self.items():
            for comment in self.comments.get(name, []):
                yield from _comment(comment, indent)
            if isinstance(value, _Tree):
                yield f"{indent}{name}:"
                yield from value.lines(indent + "  ")
            else:
                yield f"{indent}{name}: {value if isinstance(value, str) else json.dumps(value)}"


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def group(preset: str) -> str:
    """A preset's YAML group. ``histospec`` has every option with its help, the others what they set."""
    lines = ["# @package _global_", *_comment(f"Generated: {_COMMAND}"), "", *_comment(WHAT[preset])]
    tree = _Tree()
    for key, (value, why) in verl_keys(preset).items():
        tree.put(key, value, why)
    if preset == "histospec":
        for section, what in {"": "", **sections()}.items():
            if section:
                tree.put(f"{CONFIG_PATH}.{section}", _Tree(), what)
            experts = "-- for experts:"
            for option in _of(section):
                tree.put(f"{CONFIG_PATH}.{option.name}", option.default, "" if option.public else experts, option.help)
                experts = experts if option.public else ""
    elif preset != "off":
        lines += ["defaults:", "  - histospec", ""]
        for name, value in PRESETS[preset].items():
            tree.put(f"{CONFIG_PATH}.{name}", value)
    return "\n".join([*lines, *tree.lines(), ""])


def _of(section: str) -> list[Option]:
    """A section's own options, the public ones first."""
    own = [option for option in options() if option.name.rpartition(".")[0] == section]
    return sorted(own, key=lambda option: not option.public)


# ---- documentation ----


def document() -> str:
    """``docs/options.md``."""
    listed = options()
    public, experts = ([option for option in listed if option.public is kind] for kind in (True, False))
    parts = [
        f"<!-- Generated: {_COMMAND} -->",
        "# Options",
        f"All options are below `{CONFIG_PATH}`, {len(public)} for users and {len(experts)} for experts. "
        "`verl-rhyme options` lists them, `verl-rhyme options --json` as JSON. A preset sets some, a hydra override "
        "sets one:",
        f"```bash\npython -m verl.trainer.main_ppo +rhyme=full \\\n  {CONFIG_PATH}.max_staleness=2 ...\n```",
        "An unknown option is refused with the nearest known one. What cannot go together is in "
        "[combinations.md](combinations.md).",
        "## Presets",
        _table(("`+rhyme=`", "what it is", "sets"), [(f"`{name}`", WHAT[name], _set(name)) for name in PRESETS]),
        "A preset with a `max_staleness` runs the pipeline, in the trainer mode that you set: `sync` and "
        "`colocate_async` are one to it (engines and training share GPUs), `separate_async` gives engines GPUs of "
        "their own. It sets these keys of verl, too (`histospec` sets `agent_loop_manager_class` alone):",
        _table(
            ("key of verl", "value", "why"),
            [(f"`{key}`", f"`{_plain(value)}`", why) for key, (value, why) in verl_keys("full").items()],
        ),
        "## For users",
        _options(public),
        "## For experts",
        "Leave them at their defaults, unless you reproduce a paper or have measured.",
        _options(experts),
    ]
    return "\n\n".join(parts) + "\n"


def _set(preset: str) -> str:
    theirs = {"trainer.v1.trainer_mode": "separate_async"} if preset == "stream" else {}
    told = {**PRESETS[preset], **theirs}
    return ", ".join(f"`{name}={_plain(value)}`" for name, value in told.items())


def _options(of: Sequence[Option]) -> str:
    rows = [(f"`{option.name}`", f"`{_plain(option.default)}`", option.type, option.help) for option in of]
    return _table(("option", "default", "type", "what it does"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parents[2] / name).write_text(text)
