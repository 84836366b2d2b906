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


def page(file, config) -> str:
  """Returns a config file's docstring, its variants, and a config's fields."""
  module = config_lib.load(file)
  variants = ', '.join(filter(None, getattr(module, 'VARIANTS', ())))
  parts = (
    inspect.cleandoc(module.__doc__ or ''),
    variants and f'variants: {variants}',
    listing(config),
  )
  return '\n\n'.join(filter(None, parts))


def listing(config) -> str:
  """Returns all fields, at any depth, in the syntax of a command line."""
  lines = []
  for path, holder, hint in config_lib.walk(config):
    name = path.rpartition('.')[2]
    value = getattr(holder, name)
    shown = type(value).__name__ if dataclasses.is_dataclass(value) else value
    meaning = meanings(type(holder)).get(name, '')
    text = f'{meaning} ({config_lib.describe(hint)})'.strip()
    lines += [
      f'--config.{path}={shown}',
      textwrap.indent(textwrap.fill(text, 76), ' ' * 4),
    ]
  return '\n'.join(lines)


@functools.cache
def meanings(cls: type) -> dict[str, str]:
  """Returns the documentation of each field of a dataclass, by name.

  That of inherited fields comes from the base class, unless overridden.
  """
  result = {}
  for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
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
    if isinstance(node, ast.AnnAssign):
      first = node.lineno
      while first - 1 in alone:
        first -= 1
      texts = [alone[i] for i in range(first, node.lineno)]
      lines = range(node.lineno, node.end_lineno + 1)
      texts += [behind[i] for i in lines if i in behind]
      if texts:
        result[node.target.id] = ' '.join(texts)
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
