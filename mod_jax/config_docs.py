"""What the fields of configs mean, read from where they are declared.

A field's meaning is the comment above it or behind it, or what the class's
docstring says of it under `Attributes:`.
"""

import ast
import dataclasses
import functools
import inspect
import io
import re
import textwrap
import tokenize

from mod_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
  """A field of a config, for people.

  Attributes:
    path: its dotted name, as in `model.num_layers`.
    value: as it would be written on a command line.
    accepts: what it may be, in words.
    meaning: what it is for; '' where nothing is said.
  """

  path: str
  value: str
  accepts: str
  meaning: str


def fields(config, prefix: str = '') -> list[Field]:
  """Returns all fields of a config, at any depth, in the order declared.

  A field that holds a config of its own comes first, and then its fields; one
  that is None is a single field, whatever it could hold.
  """
  found = []
  hints = config_lib.annotations(type(config))
  said = meanings(type(config))
  for name, hint in hints.items():
    value = getattr(config, name)
    nested = dataclasses.is_dataclass(value)
    found.append(
      Field(
        path=f'{prefix}{name}',
        value=type(value).__name__ if nested else f'{value}',
        accepts=config_lib.describe(hint),
        meaning=said.get(name, ''),
      )
    )
    if nested:
      found += fields(value, f'{prefix}{name}.')
  return found


def page(file, config) -> str:
  """Returns what a config file is for, its variants, and the config's fields.

  Args:
    file: path of the file.
    config: what it built, perhaps changed.
  """
  module = config_lib.load(file)
  variants = ', '.join(filter(None, getattr(module, 'VARIANTS', ())))
  parts = (
    inspect.cleandoc(module.__doc__ or ''),
    variants and f'variants: {variants}',
    listing(config),
  )
  return '\n\n'.join(filter(None, parts))


def listing(config, width: int = 80) -> str:
  """Returns the fields as text, as they are given on a command line."""
  lines = []
  for field in fields(config):
    lines.append(f'--config.{field.path}={field.value}')
    said = (
      f'{field.meaning} ({field.accepts})'
      if field.meaning
      else (f'({field.accepts})')
    )
    lines += textwrap.wrap(
      said, width, initial_indent='    ', subsequent_indent='    '
    )
  return '\n'.join(lines)


@functools.cache
def meanings(cls: type) -> dict[str, str]:
  """Returns what each field of a dataclass means, by name.

  A field of a base class means what is said there, unless it is said anew.
  """
  found = {}
  for base in reversed(cls.__mro__):
    if dataclasses.is_dataclass(base):
      found |= _own_meanings(base)
  return {
    name: found[name] for name in config_lib.annotations(cls) if name in found
  }


def _own_meanings(cls) -> dict[str, str]:
  source = textwrap.dedent(inspect.getsource(cls))
  (tree,) = ast.parse(source).body
  behind, alone = _comments(source)
  found = _attributes(inspect.cleandoc(cls.__doc__ or ''))
  for node in tree.body:
    if not isinstance(node, ast.AnnAssign):
      continue
    lines = []
    above = node.lineno - 1
    while above in alone:
      lines.insert(0, alone[above])
      above -= 1
    lines += [
      behind[i] for i in range(node.lineno, node.end_lineno + 1) if i in behind
    ]
    if lines:
      found[node.target.id] = ' '.join(lines)
  return found


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
  """Returns the comments behind code, and those alone on a line, by line."""
  behind, alone = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    # A note to the linter tells nobody what a field means.
    if token.type == tokenize.COMMENT and 'noqa' not in token.string:
      kind = behind if token.line[: token.start[1]].strip() else alone
      kind[token.start[0]] = token.string.lstrip('# ')
  return behind, alone


def _attributes(doc: str) -> dict[str, str]:
  """Returns what a docstring says under `Attributes:`, by name."""
  _, _, section = doc.partition('Attributes:\n')
  section = section.partition('\n\n')[0]
  found = re.findall(
    r'^  (\w+): (.*(?:\n {4,}.*)*)', section, flags=re.MULTILINE
  )
  return {name: ' '.join(text.split()) for name, text in found}
