"""Documentation of config fields, extracted from the source of their classes.

The documentation of a field is the comment above or behind it, or its entry
under `Attributes:` in the docstring of its class.
"""

import dataclasses
import functools
import inspect
import textwrap

from simple_parsing import docstring

from mod_jax import config as config_lib


def page(file, config) -> str:
  """Returns the text about a config file: docstring, variants, and fields.

  The fields are those of `config`.
  """
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

  An inherited field has the documentation of the base class, unless the class
  overrides the field.
  """
  result = {}
  for name in config_lib.annotations(cls):
    found = docstring.get_attribute_docstring(cls, name)
    text = f'{found.comment_above} {found.comment_inline}'.strip()
    if text := text or found.desc_from_cls_docstring:
      result[name] = ' '.join(text.split())
  return result
