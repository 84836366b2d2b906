"""Writes the pages about configs, from the dataclasses and `configs/`.

`docs/conf.py` calls `write` whenever the site is built.
"""

import dataclasses
import inspect
import pathlib
import re
import typing

from mod_jax import config as config_lib
from mod_jax import config_docs
from mod_jax.sweeps.plan import SweepConfig
from mod_jax.tasks.experiment import ExperimentConfig

_FILES = """\
# Config files

Each file builds an experiment; a variant is named behind a colon, as in
`--config=configs/lm/mod.py:raw`. Every field can be set on the command line,
as in `--config.model.num_layers=8`, and `python train.py --config=FILE
--describe` prints what stands here. [Config classes](fields.md) lists all that
a field may hold.
"""
_CLASSES = """\
# Config classes

What a config can hold, with defaults. A field is set on the command line by
its path from the experiment, as in `--config.optimizer.learning_rate=1e-3`;
where a field may hold one of several classes, the whole group is given as
`--config.data="{'type': 'ImageDataConfig'}"`. A sweep begins at
[SweepConfig](#sweepconfig), anything else at
[ExperimentConfig](#experimentconfig).
"""


def write(root: pathlib.Path, docs: pathlib.Path) -> None:
  """Writes the pages into `docs/_generated`.

  Args:
    root: the repository, with `configs/`.
    docs: the folder of the site's sources.
  """
  folder = docs / '_generated'
  folder.mkdir(exist_ok=True)
  files = sorted((root / 'configs').rglob('*.py'))
  pages = {
    'configs.md': [_FILES, *(_of_file(file, root) for file in files)],
    'fields.md': [_CLASSES, *map(_of_class, classes())],
  }
  for name, parts in pages.items():
    text = '\n'.join(parts)
    path = folder / name
    # Sphinx reads again what is newer than before.
    if not path.exists() or path.read_text() != text:
      path.write_text(text)


def classes() -> list[type]:
  """Returns all dataclasses that an experiment or a sweep can hold."""
  found = {}

  def visit(cls):
    if cls in found:
      return
    found[cls] = None
    for hint in config_lib.annotations(cls).values():
      for member in (hint, *typing.get_args(hint)):
        if not isinstance(member, config_lib.Range):
          for inner in config_lib.classes_of(member).values():
            visit(inner)

  visit(ExperimentConfig)
  visit(SweepConfig)
  return list(found)


def _of_file(file, root):
  module = config_lib.load(file)
  name = file.relative_to(root).as_posix()
  variants = ', '.join(f'`{v}`' for v in module.VARIANTS if v)
  return f"""\
## {name}

{inspect.cleandoc(module.__doc__)}

Variants: {variants}.

<details><summary>All fields, without a variant</summary>

```text
{config_docs.listing(module.get_config())}
```

</details>
"""


def _of_class(cls):
  said = config_docs.meanings(cls)
  links = {
    c.__name__: f'[{c.__name__}](#{c.__name__.lower()})' for c in classes()
  }
  rows = ['| field | default | accepts | meaning |', '|---|---|---|---|']
  defaults = {f.name: f.default for f in dataclasses.fields(cls)}
  for name, hint in config_lib.annotations(cls).items():
    default = defaults[name]
    if default is dataclasses.MISSING:
      shown = 'must be given'
    elif dataclasses.is_dataclass(default):
      shown = f'`{type(default).__name__}`'
    else:
      shown = f'`{default!r}`'
    accepts = re.sub(
      r'\b[A-Z]\w+', lambda m: links.get(m[0], m[0]), config_lib.describe(hint)
    )
    cells = (f'`{name}`', shown, accepts, said.get(name, ''))
    rows.append('| ' + ' | '.join(c.replace('|', r'\|') for c in cells) + ' |')
  first = inspect.cleandoc(cls.__doc__).partition('\n\n')[0]
  table = '\n'.join(rows) if defaults else 'It has no fields.'
  return f'## {cls.__name__}\n\n`{cls.__module__}`: {first}\n\n{table}\n'
