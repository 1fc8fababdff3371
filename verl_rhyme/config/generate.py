"""Write the generated files: the YAML groups of ``conf/rhyme``, ``docs/options.md``, the tables of ``docs/metrics.md``.

Run ``python -m verl_rhyme.config.generate`` after a change of an option, a preset or a metric; a test compares.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH
from verl_rhyme.config.listing import Option, options, sections
from verl_rhyme.config.presets import PRESETS, SUMMARIES, verl_keys

_WIDTH = 120
_COMMAND = "python -m verl_rhyme.config.generate"
_ROOT = Path(__file__).parents[2]
#: A line of ``observability/metrics.py``: name, unit, meaning.
_METRIC = re.compile(r'(?:\w+ =|#) "(\w+/[\w/]+)"  # ([^:]+): (.+)')


def files() -> dict[str, str]:
    """Return the text of each generated file by its path in the repository."""
    groups = {f"verl_rhyme/conf/rhyme/{preset}.yaml": group(preset) for preset in PRESETS}
    return {**groups, "docs/options.md": document(), "docs/metrics.md": metrics()}


# ---- YAML groups ----


class _Tree(dict[str, Any]):
    """Mapping of a YAML file whose values have comments."""

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
    """Return a preset's YAML group: all options with their help for ``histospec``, else only the preset's settings."""
    lines = ["# @package _global_", *_comment(f"Generated: {_COMMAND}"), "", *_comment(SUMMARIES[preset])]
    tree = _Tree()
    for key, (value, why) in verl_keys(preset).items():
        tree.put(key, value, why)
    if preset == "histospec":
        for section, summary in {"": "", **sections()}.items():
            if section:
                tree.put(f"{CONFIG_PATH}.{section}", _Tree(), summary)
            experts = "-- For experts:"
            for option in _of(section):
                tree.put(f"{CONFIG_PATH}.{option.name}", option.default, "" if option.public else experts, option.help)
                experts = experts if option.public else ""
    elif preset != "off":
        lines += ["defaults:", "  - histospec", ""]
        for name, value in PRESETS[preset].items():
            tree.put(f"{CONFIG_PATH}.{name}", value)
    return "\n".join([*lines, *tree.lines(), ""])


def _of(section: str) -> list[Option]:
    """Return the options directly in a section, the public ones first."""
    own = [option for option in options() if option.name.rpartition(".")[0] == section]
    return sorted(own, key=lambda option: not option.public)


# ---- documentation ----


def document() -> str:
    """Return the text of ``docs/options.md``."""
    listed = options()
    public, experts = ([option for option in listed if option.public is kind] for kind in (True, False))
    parts = [
        f"<!-- Generated: {_COMMAND} -->",
        "# Options",
        f"This page lists every option of verl-rhyme: {len(public)} for users and {len(experts)} for experts. "
        f"All are below `{CONFIG_PATH}`. `verl-rhyme options` prints them, `verl-rhyme options --json` prints JSON. "
        "A preset sets some options. A hydra override sets one:",
        f"```bash\npython -m verl.trainer.main_ppo +rhyme=full \\\n  {CONFIG_PATH}.max_staleness=2 ...\n```",
        "An unknown option is an error that names the nearest known option. "
        "[combinations.md](combinations.md) lists the options that exclude each other.",
        "## Presets",
        _table(("`+rhyme=`", "description", "sets"), [(f"`{name}`", SUMMARIES[name], _set(name)) for name in PRESETS]),
        "A preset that sets `max_staleness` runs the pipeline, in the trainer mode that you choose. In `sync` and "
        "`colocate_async` the engines and the trainer share GPUs; the pipeline does not distinguish these two. In "
        "`separate_async` the engines have separate GPUs. The preset also sets these keys of verl (`histospec` sets "
        "only `agent_loop_manager_class`):",
        _table(
            ("key of verl", "value", "why"),
            [(f"`{key}`", f"`{_plain(value)}`", why) for key, (value, why) in verl_keys("full").items()],
        ),
        "## For users",
        _options(public),
        "## For experts",
        "Keep the defaults, unless you reproduce a paper or have measurements.",
        _options(experts),
    ]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """Return the text of ``docs/metrics.md`` with new tables between the marks."""
    begin, end = f"<!-- Generated: {_COMMAND} -->\n\n", "<!-- End -->"
    before, _, rest = (_ROOT / "docs/metrics.md").read_text().partition(begin)
    tables = []
    for section in (_ROOT / "verl_rhyme/observability/metrics.py").read_text().split("\n# -- ")[1:]:
        title, *lines = section.splitlines()
        found = [match.groups() for line in lines if (match := _METRIC.fullmatch(line))]
        rows = [(f"`{name}`", unit, meaning) for name, unit, meaning in found]
        tables.append(f"## {title}\n\n{_table(('metric', 'unit', 'meaning'), rows)}\n\n")
    return before + begin + "".join(tables) + end + rest.partition(end)[2]


def _set(preset: str) -> str:
    verls = {"trainer.v1.trainer_mode": "separate_async"} if preset == "stream" else {}
    settings = {**PRESETS[preset], **verls}
    return ", ".join(f"`{name}={_plain(value)}`" for name, value in settings.items())


def _options(of: Sequence[Option]) -> str:
    rows = [(f"`{option.name}`", f"`{_plain(option.default)}`", option.type, option.help) for option in of]
    return _table(("option", "default", "type", "description"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    for name, text in files().items():
        (_ROOT / name).write_text(text)
