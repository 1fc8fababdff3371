"""Write the generated files: ``docs/options.md``, and the tables of ``docs/metrics.md``.

Run ``python -m verl_rhyme.config.generate`` after a change of an option, a preset or a metric; a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH
from verl_rhyme.config.presets import GROUPS, PRESET_FILES
from verl_rhyme.config.root import Option, options

_COMMAND = "python -m verl_rhyme.config.generate"
_ROOT = Path(__file__).parents[2]
#: A line of ``observability/metrics.py``: name, unit, meaning.
_METRIC = re.compile(r'(?:\w+ =|#) "(\w+/[\w/]+)"  # ([^:]+): (.+)')


def files() -> dict[str, str]:
    """Return the text of each generated file by its path in the repository."""
    return {"docs/options.md": document(), "docs/metrics.md": metrics()}


def document() -> str:
    """Return the text of ``docs/options.md``."""
    listed = options()
    public, experts = ([option for option in listed if option.public is kind] for kind in (True, False))
    presets = [
        (f"`{name}`", summary, ", ".join(_setting(key, value) for key, value in settings.items()))
        for name, (summary, settings) in PRESET_FILES.items()
    ]
    pipeline = (GROUPS / "rhyme/parts/pipeline.yaml").read_text().partition("\n\n")[2]
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
        _table(("`+rhyme=`", "description", "sets"), presets),
        "A preset that sets `max_staleness` runs the pipeline, in the trainer mode that you choose. In `sync` and "
        "`colocate_async` the engines and the trainer share GPUs; the pipeline does not distinguish these two. In "
        "`separate_async` the engines have separate GPUs. The preset also sets these keys of verl:",
        f"```yaml\n{pipeline}```",
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


def _setting(key: str, value: Any) -> str:
    return f"`{key.removeprefix(f'{CONFIG_PATH}.')}={_plain(value)}`"


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
