"""Documentation of config fields, extracted from the source of their classes.

The documentation of a field is the comment above or behind it, or its entry
under `Attributes:` in the docstring of its class.
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
  """Documentation of a config field.

  Attributes:
    path: its dotted name, as in `model.num_layers`.
    value: its value, as written on a command line.
    accepts: description of the values that it allows.
    meaning: its documentation; '' if there is none.
  """

  path: str
  value: str
  accepts: str
  meaning: str


def fields(config, prefix: str = '') -> list[Field]:
  """Returns all fields of a config, at any depth, in order of declaration.

  A field that holds a config is followed by the fields of that config; a field
  that is None has no fields.
  """
  result = []
  hints = config_lib.annotations(type(config))
  documentation = meanings(type(config))
  for name, hint in hints.items():
    value = getattr(config, name)
    nested = dataclasses.is_dataclass(value)
    result.append(
      Field(
        path=f'{prefix}{name}',
        value=type(value).__name__ if nested else f'{value}',
        accepts=config_lib.describe(hint),
        meaning=documentation.get(name, ''),
      )
    )
    if nested:
      result += fields(value, f'{prefix}{name}.')
  return result


def page(file, config) -> str:
  """Returns the docstring and variants of a config file, and a config's fields.

  Args:
    file: path of the file.
    config: the config that it built, perhaps changed.
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
  """Returns the fields as text, in the syntax of a command line."""
  lines = []
  for field in fields(config):
    lines.append(f'--config.{field.path}={field.value}')
    description = (
      f'{field.meaning} ({field.accepts})'
      if field.meaning
      else (f'({field.accepts})')
    )
    lines += textwrap.wrap(
      description, width, initial_indent='    ', subsequent_indent='    '
    )
  return '\n'.join(lines)


@functools.cache
def meanings(cls: type) -> dict[str, str]:
  """Returns the documentation of each field of a dataclass, by name.

  That of inherited fields comes from the base class, unless overridden.
  """
  result = {}
  for base in reversed(cls.__mro__):
    if dataclasses.is_dataclass(base):
      result |= _own_meanings(base)
  return {
    name: result[name] for name in config_lib.annotations(cls) if name in result
  }


def _own_meanings(cls) -> dict[str, str]:
  source = textwrap.dedent(inspect.getsource(cls))
  (tree,) = ast.parse(source).body
  behind, alone = _comments(source)
  result = _attributes(inspect.cleandoc(cls.__doc__ or ''))
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
      result[node.target.id] = ' '.join(lines)
  return result


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
  """Returns the comments behind code, and those alone on a line, by line."""
  behind, alone = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    # Comments for the linter are no documentation.
    if token.type == tokenize.COMMENT and 'noqa' not in token.string:
      kind = behind if token.line[: token.start[1]].strip() else alone
      kind[token.start[0]] = token.string.lstrip('# ')
  return behind, alone


def _attributes(doc: str) -> dict[str, str]:
  """Returns the entries under `Attributes:` in a docstring, by name."""
  _, _, section = doc.partition('Attributes:\n')
  section = section.partition('\n\n')[0]
  entries = re.findall(
    r'^  (\w+): (.*(?:\n {4,}.*)*)', section, flags=re.MULTILINE
  )
  return {name: ' '.join(text.split()) for name, text in entries}
