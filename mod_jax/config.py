"""Configs: frozen dataclasses, set on command lines, saved as JSON.

A config is a frozen, keyword-only dataclass that is `Validated`, or whose
`__post_init__` calls `validate(self)`. Its fields are bool, int, float, str,
`Literal` choices, tuples of these, other such dataclasses, and unions of these
and None. `Annotated` gives the `Range` of a number, as in the aliases below;
conditions on several fields are checked in `__post_init__`.

No config is defined here. Each is beside the code that it configures; those of
a run are in `runs/run_config.py` and `tasks/experiment.py`.
"""

import ast
from collections.abc import Mapping
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import operator
import pathlib
import sys
import types
import typing
from typing import Annotated

from mod_jax.errors import UserError, require

_NAMES = {
  bool: ('true or false', 'booleans'),
  int: ('an integer', 'integers'),
  float: ('a number', 'numbers'),
  str: ('a string', 'strings'),
  types.NoneType: ('None', 'None'),
}
# The JSON key that names the class, in a union of dataclasses.
_TYPE_KEY = 'type'
# Smallest and largest positive normal number of float32, in which models
# compute: larger ones overflow to infinity, smaller ones may be flushed to 0.
_FLOAT32 = (2.0**-126, (1 - 2.0**-24) * 2.0**128)
# Prefix of the module names of config files.
_CONFIG_FILE = 'config file '
_SHOWN = 200  # Characters of an invalid value to show in a message.
_NO = object()  # What `_fit` returns for a value that is not allowed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """Bounds of a number, each named after the comparison in `operator`."""

  gt: float | None = None
  ge: float | None = None
  lt: float | None = None
  le: float | None = None

  def __contains__(self, number):
    return all(
      bound is None or getattr(operator, name)(number, bound)
      for name, bound in vars(self).items()
    )

  def __str__(self):
    """Describes the range in words, as in `from 1 to 1,000`."""
    low = self.ge if self.gt is None else self.gt
    high = self.le if self.lt is None else self.lt
    low, high = (
      f'{end:,}' if isinstance(end, int) else f'{end:g}'
      for end in (low, math.inf if high is None else high)
    )
    if high == 'inf':
      return f'above {low}' if self.ge is None else f'of {low} or more'
    if self.gt is None and self.lt is None:
      return f'from {low} to {high}'
    opening, closing = '[('[self.ge is None], ')]'[self.lt is None]
    return f'in {opening}{low}, {high}{closing}'


# The limits are generous, yet the product of three sizes fits in int64.
Size = Annotated[int, Range(ge=1, le=2**20)]  # Length of an array's axis.
Width = Annotated[int, Range(ge=1, le=2**17)]  # Features, before FFNs expand.
Count = Annotated[int, Range(ge=0, le=10**9)]  # Such as steps; fits in int32.
PositiveCount = Annotated[int, Range(ge=1, le=10**9)]
# `Unrolled` is a number of blocks, or of other parts that JAX traces one by
# one; `Layer` is the index of a block.
Unrolled = Annotated[int, Range(ge=1, le=1000)]
Layer = Annotated[int, Range(ge=0, le=999)]
Pixels = Annotated[int, Range(ge=1, le=2**14)]  # Along a side.
Seed = Annotated[int, Range(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Range(ge=0, le=1024)]  # Threads or processes.
Positive = Annotated[float, Range(gt=0)]
Positives = tuple[Positive, Positive, Positive]  # One for each channel.
Factor = Annotated[float, Range(gt=0, le=1000)]  # Multiplies activations.
Weight = Annotated[float, Range(ge=0, le=10**6)]  # Multiplies a loss.
Fraction = Annotated[float, Range(gt=0, le=1)]
Proper = Annotated[float, Range(gt=0, lt=1)]  # A proper fraction.
Probability = Annotated[float, Range(ge=0, le=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
# Decay of a moving average. A larger decay may round to 1 in float32, and the
# average would then never change.
Decay = Annotated[float, Range(ge=0, le=0.999999)]
# Added to a divisor; large enough for a finite inverse in float32.
Epsilon = Annotated[float, Range(ge=1e-30)]
Temperature = Annotated[float, Range(ge=1e-4, le=1e4)]  # Divides logits.
# A part of a run: a number of steps, or a fraction of all steps.
Steps = Count | Proper


def steps_of(part, num_steps):
  """Returns a `Steps` as a number of steps; a fraction never gives them all."""
  if isinstance(part, int):
    return part
  return min(round(part * num_steps), num_steps - 1)


def nearest(name, choices, part=str):
  """Returns ` Did you mean 'x'?` for the closest choice, or an empty string.

  `part` maps a name to the text to compare, such as the last part of a path.
  """
  lowered = {part(choice).lower(): str(choice) for choice in choices}
  match = difflib.get_close_matches(part(name).lower(), lowered, n=1)
  return f' Did you mean {lowered[match[0]]!r}?' if match else ''


def choose(name, table, what='variant'):
  """Returns `table[name]`; raises UserError `unknown {what} {name}: …`."""
  if name in table:
    return table[name]
  names = ', '.join(map(repr, table))
  raise UserError(
    f'unknown {what} {name!r}: expected one of {names}.{nearest(name, table)}'
  )


@functools.cache
def annotations(cls):
  """Returns name -> annotation of a dataclass, in order of declaration."""
  hints = typing.get_type_hints(cls, include_extras=True)
  return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _members(hint):
  """Returns the alternatives of a union, or the one annotation itself."""
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return typing.get_args(hint)
  return (hint,)


def classes_of(hint):
  """Returns the dataclasses that an annotation allows, by their names in JSON.

  An abstract class stands for all of its concrete subclasses that are imported.
  The names of classes of other packages include the module.
  """
  classes = {}
  for member in filter(dataclasses.is_dataclass, _members(hint)):
    if not inspect.isabstract(member):
      classes[member.__name__] = member
      continue
    for cls in _concrete(member):
      module = cls.__module__
      ours = module.startswith(f'{__package__}.')
      classes[cls.__name__ if ours else f'{module}:{cls.__qualname__}'] = cls
  return classes


def _concrete(cls):
  for sub in cls.__subclasses__():
    if not inspect.isabstract(sub):
      yield sub
    yield from _concrete(sub)


def _is_tagged(hint):
  """Returns whether a saved config must name the class of a value."""
  return len(classes_of(hint)) > 1 or any(
    map(inspect.isabstract, _members(hint))
  )


def describe(hint, plural=False):
  """Describes in words the values that an annotation allows."""
  if hint in _NAMES:
    return _NAMES[hint][plural]
  if dataclasses.is_dataclass(hint):
    return hint.__name__
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return f'{describe(args[0], plural)} {args[1]}'
  if origin is typing.Literal:
    return 'one of ' + ', '.join(map(repr, args))
  if origin is tuple:
    if args[-1] is Ellipsis:
      elements = describe(args[0], plural=True)
    else:
      elements = '(' + ', '.join(map(describe, args)) + ')'
    return f'tuples of {elements}' if plural else f'a tuple of {elements}'
  return ' or '.join(describe(arg, plural) for arg in args)


def _elements(hint, value):
  """Returns the annotations of a tuple's elements; () if the length differs."""
  args = typing.get_args(hint)
  if args[-1] is Ellipsis:
    return args[:1] * len(value)
  return args if len(args) == len(value) else ()


def _is_number(value):
  return isinstance(value, int | float) and not isinstance(value, bool)


def _fits_float32(number):
  # Python compares ints with floats exactly, however large the ints.
  return number == 0 or _FLOAT32[0] <= abs(number) <= _FLOAT32[1]


def _fit(value, hint):
  """Returns a value in the type of its field, or `_NO` if it is not allowed.

  An integer becomes a float if the field is a float, so that equal configs give
  equal JSON. A bool does not count as an integer.
  """
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    fitted = (_fit(value, member) for member in args)
    return next((f for f in fitted if f is not _NO), _NO)
  if origin is tuple:
    if not isinstance(value, tuple):
      return _NO
    hints = _elements(hint, value)
    fitted = tuple(map(_fit, value, hints))
    return fitted if len(hints) == len(value) and _NO not in fitted else _NO
  if origin is Annotated:
    value = _fit(value, args[0])
    fits = value is not _NO and value in args[1]
  elif origin is typing.Literal:
    fits = any(type(value) is type(arg) and value == arg for arg in args)
  elif hint is float:
    fits = _is_number(value) and _fits_float32(value)
    value = float(value) if fits else value
  elif hint is int:
    fits = isinstance(value, int) and not isinstance(value, bool)
  elif hint in _NAMES or dataclasses.is_dataclass(hint):
    fits = isinstance(value, hint)
  else:
    raise TypeError(f'{hint!r}: config fields cannot have this annotation')
  return value if fits else _NO


def _fitted(path, value, hint, shown=None):
  """Returns `_fit` of a field's value; raises UserError if it is not allowed.

  Messages show the value as `shown`, the user's text; None shows its `repr`.
  """
  fitted = _fit(value, hint)
  if fitted is not _NO:
    return fitted
  members = _members(hint)
  if isinstance(value, tuple) and shown is None:
    for member in (m for m in members if typing.get_origin(m) is tuple):
      # Naming the first wrong element is clearer than showing all.
      for i, element_hint in enumerate(_elements(member, value)):
        _fitted(f'{path}[{i}]', value[i], element_hint)
  hints = ''
  if isinstance(value, str):
    literals = (m for m in members if typing.get_origin(m) is typing.Literal)
    hints = nearest(value, [c for m in literals for c in typing.get_args(m)])
  if _is_number(value) and not _fits_float32(value):
    hints = ' Models compute in float32, where it must be finite and not 0.'
  if dataclasses.is_dataclass(value):
    shown = f'{type(value).__name__}(...)'  # All its fields would be too long.
  elif shown is None:
    shown = repr(value)
  if len(shown) > _SHOWN:
    shown = f'{shown[:_SHOWN]}...'
  raise UserError(f'{path}={shown}: expected {describe(hint)}.{hints}')


def validate(instance):
  """Checks every field of a dataclass instance against its annotation.

  Call it first in `__post_init__`. Returns a function that checks conditions on
  several fields: `check(self.a < self.b, 'a < b', 'a', 'b')`.
  """
  cls = type(instance)
  for name, hint in annotations(cls).items():
    _fitted(f'{cls.__name__}.{name}', getattr(instance, name), hint)
  return functools.partial(check, instance)


class Validated:
  """Base of dataclasses that check each field against its annotation."""

  def __post_init__(self):
    validate(self)


def check(instance, condition, expected, *names):
  """Raises UserError, which shows the named fields, if a condition is false."""
  values = {name: getattr(instance, name) for name in names}
  require(condition, expected, **values)


def trust(modules):
  """Imports modules, so that saved configs may name their classes.

  Reading a config imports nothing: otherwise its author could name any module
  and so run its code. So the modules of its classes must be imported before.
  """
  for name in modules:
    try:
      importlib.import_module(name)
    except (ImportError, TypeError, ValueError) as error:
      raise UserError(
        f'trust={name!r}: no such module can be imported ({error}): put its'
        ' directory on PYTHONPATH, and give its name with dots.'
      ) from error


def to_json(instance):
  """Returns a dataclass instance as indented JSON, fields in declared order."""
  return json.dumps(_encode(instance, type(instance)), indent=2) + '\n'


def _encode(value, hint):
  """Returns the value as dicts, tuples and scalars."""
  if isinstance(value, tuple):
    member = next(m for m in _members(hint) if _fit(value, m) is not _NO)
    return tuple(map(_encode, value, _elements(member, value)))
  if not dataclasses.is_dataclass(value):
    return _fit(value, hint)
  cls = type(value)
  fields = {
    name: _encode(getattr(value, name), sub_hint)
    for name, sub_hint in annotations(cls).items()
  }
  if not _is_tagged(hint):
    return fields
  tags = {c: tag for tag, c in classes_of(hint).items()}
  tag = tags.get(cls, cls.__name__)
  if _TYPE_KEY in fields:
    raise TypeError(f'{cls.__name__}: a class of a union has no field `type`')
  if tag.startswith(_CONFIG_FILE):
    raise UserError(
      f'{cls.__name__} is defined in a {cls.__module__}: a saved config could'
      ' not be read again, since nobody can import it from there. Move it to a'
      ' module beside it, and import it from there.'
    )
  return {_TYPE_KEY: tag} | fields


def _tuples(value):
  """Returns a value whose lists, at any depth, are tuples."""
  if isinstance(value, list | tuple):
    return tuple(map(_tuples, value))
  if isinstance(value, Mapping):
    return {key: _tuples(element) for key, element in value.items()}
  return value


def _holds_groups(value) -> bool:
  """Returns whether a value is a tuple with a mapping (for a dataclass)."""
  return isinstance(value, tuple) and any(
    isinstance(element, Mapping) for element in value
  )


def _decode(value, hint, path, shown=None):
  """Inverts `_encode`; raises UserError if the annotation forbids the value.

  Messages show the value as `shown`, as in `_fitted`.
  """
  if isinstance(value, Mapping) and classes_of(hint):
    return _decode_dataclass(value, hint, path)
  tuples = [m for m in _members(hint) if typing.get_origin(m) is tuple]
  if tuples and _holds_groups(value):
    hints = _elements(tuples[0], value)
    value = tuple(
      _decode(element, element_hint, f'{path}[{i}]')
      for i, (element, element_hint) in enumerate(
        zip(value, hints, strict=False)
      )
    )
    shown = None  # Messages name the first wrong element.
  return _fitted(path, value, hint, shown)


def _decode_dataclass(fields, hint, path):
  # A mapping without `type` is of the first class: where a field has become a
  # union, configs that were saved before can still be read.
  classes, fields = classes_of(hint), dict(fields)
  tag = next(iter(classes))
  if _TYPE_KEY in fields and _is_tagged(hint):
    tag = _known_tag(fields.pop(_TYPE_KEY), classes, _join(path, _TYPE_KEY))
  cls = classes[tag]
  hints = annotations(cls)
  for key in fields:
    if key not in hints:
      near = nearest(key, hints) or f' Its fields are {", ".join(hints)}.'
      raise UserError(
        f'{_join(path, key)}: {cls.__name__} has no field {key!r}.{near}'
      )
  for field in dataclasses.fields(cls):
    name, where = field.name, _join(path, field.name)
    if name in fields:
      fields[name] = _decode(fields[name], hints[name], where)
    elif field.default is field.default_factory is dataclasses.MISSING:
      raise UserError(f'{where} is missing: expected {describe(hints[name])}.')
  with inside(path):
    return cls(**fields)


def _known_tag(tag, classes, path):
  module, colon, _ = str(tag).partition(':')
  if colon and module not in sys.modules:
    raise UserError(
      f'{path}={tag!r} is a class of a module that is not imported, and reading'
      ' a config imports none, since that would run its code. If you trust it,'
      f' import it before, or say trust=[{module!r}], in scripts'
      f' --trust={module}.'
    )
  return _fitted(path, tag, typing.Literal[tuple(classes)])


def from_dict(cls, mapping):
  """Returns an instance of dataclass `cls` with the values of a mapping.

  Absent fields take their defaults. Lists are accepted for tuples, integers for
  floats, and mappings for dataclasses. Where one of several dataclasses is
  allowed, the mapping has a key `type`, the name of the class. UserErrors name
  the dotted path of the field.
  """
  if not isinstance(mapping, Mapping):
    raise UserError(
      f'the config is a {type(mapping).__name__}: expected the fields of'
      f' {cls.__name__}.'
    )
  try:
    return _decode_dataclass(_tuples(mapping), cls, '')
  except (OverflowError, RecursionError) as error:
    raise UserError(f'the config cannot be read ({error}).') from error


def from_known(cls, mapping, where):
  """Returns an instance of `cls` as `from_dict` does, but ignores unknown keys.

  It reads files of other programs. `cls` declares the keys that are used, and
  messages begin with `where`, the name of the source.
  """
  with inside(where):
    return from_dict(
      cls, {key: mapping[key] for key in annotations(cls) if key in mapping}
    )


def from_json(cls, text):
  """Returns an instance of dataclass `cls` from the output of `to_json`."""
  try:
    decoded = json.loads(text)
  # ValueError is also raised for huge integers.
  except (ValueError, RecursionError) as error:
    raise UserError(
      f'the saved config is no JSON ({error}): restore it from a copy, or write'
      ' it anew by mod_jax.config.to_json.'
    ) from error
  return from_dict(cls, decoded)


def read_literal(text):
  """Returns the value of a Python literal, lists as tuples; else the text."""
  try:
    value = ast.literal_eval(text)
    repr(value)  # Fails for hexadecimal integers too long to print.
    return _tuples(value)
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
    return text


def split(text, brackets, quotes=''):
  """Returns the parts of a text between commas; blank parts are left out.

  Commas within brackets or `quotes` do not separate. `brackets` has the opening
  brackets, then the closing ones: `[{]}`.
  """
  pairs = len(brackets) // 2
  opening, closing = brackets[:pairs], brackets[pairs:]
  parts, depth, quote = [''], 0, None
  for letter in text:
    if quote:
      quote = None if letter == quote else quote
    elif letter in quotes and not parts[-1][-1:].isalnum():  # Not "dog's".
      quote = letter
    else:
      depth += (letter in opening) - (letter in closing)
    if letter == ',' and not depth and not quote:
      parts.append('')
    else:
      parts[-1] += letter
  return [part for part in parts if part.strip()]


def parse(text, hint):
  """Parses text from a command line as a value of a field.

  Strings are written without quotes, tuples with or without brackets, and
  dataclasses as `{'name': value}`. A value that the field does not allow is
  returned as well; `fit` refuses it.
  """
  whole, text = text, text.strip()
  words = {'none': None, 'true': True, 'false': False}
  value = read_literal(text)
  parts = (part.strip() for part in split(text, '([{)]}', '"\''))
  parts = tuple(map(read_literal, parts))
  word = words.get(text.lower(), _NO)
  # A string, such as a prompt, may begin or end with spaces.
  for candidate in (word, whole, text, value, parts, (value,)):
    if _fit(candidate, hint) is not _NO:
      return candidate
  return value


def fit(value, hint, path, shown=None):
  """Returns a value from `parse` in the type of its field.

  A mapping becomes a dataclass. Raises UserError if the annotation forbids the
  value; the message shows `path` and `shown`, as the user wrote them.
  """
  if isinstance(value, dict) and _is_tagged(hint) and _TYPE_KEY not in value:
    names = describe(typing.Literal[tuple(classes_of(hint))])
    raise UserError(
      f'{path}.{_TYPE_KEY} is missing: say which group of fields is meant,'
      f' {names}.'
    )
  return _decode(value, hint, path, shown)


def field(instance, path, where='', groups=types.MappingProxyType({})):
  """Returns the annotation of a nested dataclass's field, by dotted path.

  Raises UserError if there is no such field. `where` is a prefix in messages,
  such as `--config.`. `groups` are dataclasses, by dotted path, that replace
  those of the instance.
  """
  # Messages name the outermost config as flags do: `config`.
  parent = where.strip('-.') if where.endswith('.') else ''
  holder, hint, parts = instance, None, path.split('.')
  for i, part in enumerate(parts):
    if not dataclasses.is_dataclass(holder):
      raise UserError(
        f'{where}{path}: {parent} is {holder!r} and has no {part!r}.'
      )
    hints = annotations(type(holder))
    if part not in hints:
      similar = _meant(instance, '.'.join(parts[:i]), parts[-1])
      near = f' Its fields are {", ".join(hints)}.'
      if similar:
        near = f' Did you mean {" or ".join(map(repr, similar))}?'
      raise UserError(
        f'{where}{path}: {parent or type(holder).__name__} has no field'
        f' {part!r}.{near}'
      )
    hint = hints[part]
    holder = groups.get('.'.join(parts[: i + 1]), getattr(holder, part))
    parent = _join(parent, part)
  return hint


def walk(instance, prefix=''):
  """Yields (dotted path, owner, annotation) of all fields, at any depth.

  The owner is the dataclass instance that has the field.
  """
  for name, hint in annotations(type(instance)).items():
    yield f'{prefix}{name}', instance, hint
    value = getattr(instance, name)
    if dataclasses.is_dataclass(value):
      yield from walk(value, f'{prefix}{name}.')


def _meant(instance, group, name):
  """Returns the paths that may be meant by an unknown field of a group.

  These are the fields whose name, or its initials such as `lr`, are closest. If
  none of them is in the group, at most 3 of other groups are returned.
  """
  paths = {}  # By name and by its initials, paths of outer groups first.
  for path in sorted(
    (p for p, *_ in walk(instance)), key=lambda p: p.count('.')
  ):
    last = path.rpartition('.')[2]
    for spelling in {last, ''.join(word[0] for word in last.split('_'))}:
      paths.setdefault(spelling, []).append(path)
  names = [n for n in paths if len(n) > 1]
  near = difflib.get_close_matches(name.lower(), names, n=1)
  meant = [path for n in near for path in paths[n]]
  siblings = [p for p in meant if p.rpartition('.')[0] == group]
  return siblings or meant[:3]


def override(instance, texts, where='--config.'):
  """Returns a copy of a nested dataclass with fields parsed from texts.

  `texts` are pairs of a dotted path and the text of its value; messages show
  `where` before the path. All fields are set at once, so only the final
  combination must be valid. Whole groups are parsed before their single fields.
  """

  def outer_groups_first(pair):
    is_group = pair[1].lstrip().startswith('{')
    return pair[0].count('.') if is_group else math.inf

  changes = {}
  for path, text in sorted(texts, key=outer_groups_first):
    hint = field(instance, path, where, changes)
    changes[path] = fit(parse(text, hint), hint, where + path, text)
  return replace(instance, changes)


def replace(instance, changes, where=''):
  """Returns a copy of a nested dataclass with some fields changed.

  A class may have a method `implied(changes)` that returns further changes.

  Args:
    instance: a dataclass instance; not modified.
    changes: values by dotted path, `{'model.num_layers': 2}`.
    where: path of the instance in messages.
  """
  if hasattr(instance, 'implied'):
    changes = {**changes, **instance.implied(changes)}
  values, nested = {}, {}
  for path, value in changes.items():
    first, _, rest = path.partition('.')
    if first not in getattr(instance, '__dataclass_fields__', ()):
      field(instance, path, f'{where}.' if where else '')  # Raises UserError.
    if rest:
      nested.setdefault(first, {})[rest] = value
    else:
      values[first] = value
  for name, inner in nested.items():
    old = values.get(name, getattr(instance, name))
    values[name] = replace(old, inner, _join(where, name))
  with inside(where):
    return dataclasses.replace(instance, **values)


def diff(a, b):
  """Returns a line for each field that differs: `model.width: 128 -> 256`."""
  if type(a) is not type(b):
    return [f'{_TYPE_KEY}: {type(a).__name__} -> {type(b).__name__}']
  lines = []
  for name in annotations(type(a)):
    old, new = getattr(a, name), getattr(b, name)
    if dataclasses.is_dataclass(old) and type(old) is type(new):
      lines += [f'{name}.{line}' for line in diff(old, new)]
    elif old != new:
      lines.append(f'{name}: {old!r} -> {new!r}')
  return lines


def _join(path, name):
  return f'{path}.{name}' if path else name


@contextlib.contextmanager
def inside(where):
  """Context manager: UserErrors' messages begin with `where`, unless empty."""
  try:
    yield
  except UserError as error:
    raise UserError(f'{where}: {error}' if where else str(error)) from error


def config_getter(variants):
  """Returns the `get_config` of a config file.

  `variants` maps names to functions that return a config; '' is the default.
  """
  return lambda variant='': choose(variant, variants)()


def sibling(file, name):
  """Returns, as `load` does, the config file `name`.py beside `file`."""
  return load(pathlib.Path(file).parent / f'{name}.py')


def load(path):
  """Returns a config file as a module; executes it anew at each call."""
  path = pathlib.Path(path).resolve()
  spec = importlib.util.spec_from_file_location(f'{_CONFIG_FILE}{path}', path)
  if spec is None:
    raise UserError(f'{path} is no config file: expected Python, FILE.py.')
  module = importlib.util.module_from_spec(spec)
  # Dataclasses and `inspect` look up the modules of classes in `sys.modules`.
  sys.modules[spec.name] = module
  # The file can import modules from its directory, as a script can.
  sys.path.append(str(path.parent))
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(str(path.parent))
  return module
