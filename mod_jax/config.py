"""Frozen dataclasses from command lines, to JSON and back; knows no model.

A config is a frozen, keyword-only dataclass whose `__post_init__` calls
`validate(self)`. Its fields are bool, int, float, str, `Literal` choices,
tuples of these, other such dataclasses, and `X | None` or wider unions of them.
Numbers say within which `Range` they lie by `Annotated`, as in the aliases
below; what depends on several fields is for `__post_init__` to check.
"""

import ast
import collections.abc
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

from mod_jax.errors import UserError

_NoneType = type(None)
_NAMES = {
  bool: ('true or false', 'booleans'),
  int: ('an integer', 'integers'),
  float: ('a number', 'numbers'),
  str: ('a string', 'strings'),
  _NoneType: ('None', 'None'),
}
# The key that tells which class of a union of dataclasses is meant.
_TYPE_KEY = 'type'
# Sizes of numbers that float32 holds, in which models compute: what is larger
# is infinite there, and what is smaller is 0.
_FLOAT32 = (2.0**-126, (1 - 2.0**-24) * 2.0**128)
# Begins the names of modules that are config files.
_CONFIG_FILE = 'config file '
_SHOWN = 200  # Characters of a refused value.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """Within which bounds a number lies; they are named as in `operator`."""

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
    """Says which numbers are in it, as in `from 1 to 1,000`."""
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


# Sizes are generous, but nothing that is made of so many takes for ever, and
# products of a few of them fit 64 bits.
Size = Annotated[int, Range(ge=1, le=2**20)]  # The size of an array's axis.
Width = Annotated[int, Range(ge=1, le=2**17)]  # Features, which FFNs multiply.
Count = Annotated[int, Range(ge=0, le=10**9)]  # Such as steps; fits int32.
PositiveCount = Annotated[int, Range(ge=1, le=10**9)]
# What is traced or compiled one by one, such as blocks; and one of these.
Unrolled = Annotated[int, Range(ge=1, le=1000)]
Layer = Annotated[int, Range(ge=0, le=999)]
Pixels = Annotated[int, Range(ge=1, le=2**14)]  # Along a side.
Seed = Annotated[int, Range(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Range(ge=0, le=1024)]  # Threads or processes.
Positive = Annotated[float, Range(gt=0)]
Factor = Annotated[float, Range(gt=0, le=1000)]  # On activations.
Weight = Annotated[float, Range(ge=0, le=10**6)]  # Of a loss.
Fraction = Annotated[float, Range(gt=0, le=1)]  # A part that is never nothing.
Proper = Annotated[float, Range(gt=0, lt=1)]  # Nor everything.
Probability = Annotated[float, Range(ge=0, le=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
# The decay of a moving average. A larger one soon rounds to 1 in float32, with
# which an average never moves.
Decay = Annotated[float, Range(ge=0, le=0.999999)]
# Added to what is divided by; its square root and inverse are finite.
Epsilon = Annotated[float, Range(ge=1e-30)]
Temperature = Annotated[float, Range(ge=1e-4, le=1e4)]  # Logits are divided.
# A part of a run: a number of steps, or a fraction of all of them.
Steps = Count | Proper


def steps_of(part, num_steps):
  """Returns the steps of a part of a run, a fraction of which is never all."""
  if isinstance(part, int):
    return part
  return min(round(part * num_steps), num_steps - 1)


def nearest(name, choices):
  """Returns ` Did you mean 'x'?` for the closest choice, or an empty string."""
  lowered = {str(choice).lower(): str(choice) for choice in choices}
  match = difflib.get_close_matches(str(name).lower(), lowered, n=1)
  return f' Did you mean {lowered[match[0]]!r}?' if match else ''


def choose(name, table, what='variant'):
  """Returns `table[name]`; for the variants of a config file and the like.

  Raises:
    UserError: if `name` is not in `table`; says `what` the names stand for.
  """
  if name in table:
    return table[name]
  known = ', '.join(repr(key) for key in table)
  raise UserError(
    f'unknown {what} {name!r}: expected one of {known}.{nearest(name, table)}'
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


def _bare(hint):
  """Returns an annotation without its range."""
  return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def classes_of(hint):
  """Returns the dataclasses that an annotation allows.

  An abstract one stands for all its subclasses that are there.
  """
  classes = []
  for member in filter(dataclasses.is_dataclass, _members(hint)):
    classes += _concrete(member) if inspect.isabstract(member) else [member]
  return tuple(classes)


def _concrete(cls):
  for sub in cls.__subclasses__():
    if not inspect.isabstract(sub):
      yield sub
    yield from _concrete(sub)


def _is_open(hint):
  """Whether an annotation allows classes that nobody has heard of yet."""
  members = filter(dataclasses.is_dataclass, _members(hint))
  return any(map(inspect.isabstract, members))


def _tag_of(cls, hint):
  """Returns what a class is called in saved configs.

  Its name; and its module as well, if it is somebody else's.
  """
  if _is_open(hint) and cls.__module__.split('.')[0] != __name__.split('.')[0]:
    return f'{cls.__module__}:{cls.__qualname__}'
  return cls.__name__


def trust(modules):
  """Imports modules whose classes the configs that are read next may name.

  Reading a config imports nothing, since whoever wrote it could name any module
  and so have its code run; what it names must be imported before.

  Args:
    modules: dotted names.

  Raises:
    UserError: one cannot be imported.
  """
  for name in modules:
    try:
      importlib.import_module(name)
    except (ImportError, TypeError, ValueError) as error:
      raise UserError(
        f'trust={name!r}: no such module can be imported ({error}): put its'
        ' directory on PYTHONPATH, and give its name with dots.'
      ) from error


def _no_class(path, kind, hint):
  """Returns the UserError for a `type` that names no class that is there."""
  module, colon, _ = kind.partition(':') if isinstance(kind, str) else 3 * ('',)
  if not colon or not _is_open(hint) or module in sys.modules:
    names = tuple(_tag_of(c, hint) for c in classes_of(hint))
    return _refusal(path, kind, typing.Literal[names])
  return UserError(
    f'{path}={kind!r} is a class of a module that is not imported, and reading'
    ' a config imports none, since that would run its code. If you trust it,'
    f' import it before, or say trust=[{module!r}], in scripts'
    f' --trust={module}.'
  )


def _unsupported(hint):
  return TypeError(f'{hint!r}: config fields cannot have this annotation')


def describe(hint, plural=False):
  """Says in words what an annotation accepts."""
  if hint in _NAMES:
    return _NAMES[hint][plural]
  if dataclasses.is_dataclass(hint):
    return hint.__name__
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return f'{describe(args[0], plural)} {args[1]}'
  if origin is typing.Literal:
    choices = ', '.join(repr(choice) for choice in args)
    return f'one of {choices}'
  if origin is tuple:
    if args[-1] is Ellipsis:
      what = describe(args[0], plural=True)
    else:
      what = '(' + ', '.join(describe(arg) for arg in args) + ')'
    return f'tuples of {what}' if plural else f'a tuple of {what}'
  if len(_members(hint)) > 1:
    return ' or '.join(describe(arg, plural) for arg in args)
  raise _unsupported(hint)


def _is_number(value):
  return isinstance(value, int | float) and not isinstance(value, bool)


def _fits_float32(number):
  # Comparisons of ints with floats are exact, however large the ints.
  return number == 0 or _FLOAT32[0] <= abs(number) <= _FLOAT32[1]


def _arguments(hint, value):
  """Returns the annotations of a tuple's elements; () if too few or many."""
  args = typing.get_args(hint)
  if args[-1] is Ellipsis:
    return args[:1] * len(value)
  return args if len(args) == len(value) else ()


def _matches(value, hint):
  """Tells whether a value is what the annotation says."""
  if hint is _NoneType:
    return value is None
  if hint is int:
    return isinstance(value, int) and not isinstance(value, bool)
  if hint is float:
    return _is_number(value) and _fits_float32(value)
  if hint in (bool, str) or dataclasses.is_dataclass(hint):
    return isinstance(value, hint)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return _matches(value, args[0]) and value in args[1]
  if origin is typing.Literal:
    return any(type(value) is type(arg) and value == arg for arg in args)
  if origin is tuple:
    if not isinstance(value, tuple):
      return False
    args = _arguments(hint, value)
    return len(args) == len(value) and all(map(_matches, value, args))
  if len(_members(hint)) > 1:
    return any(_matches(value, arg) for arg in args)
  raise _unsupported(hint)


def _refusal(path, value, hint, shown=None):
  """Returns the UserError for a field's value that its annotation refuses.

  `shown` is what a person wrote for the value.
  """
  for member in _members(hint) if shown is None else ():
    if typing.get_origin(member) is tuple and isinstance(value, tuple):
      # The first element that is wrong tells more than all together.
      for i, arg in enumerate(_arguments(member, value)):
        if not _matches(value[i], arg):
          return _refusal(f'{path}[{i}]', value[i], arg)
  choices = [
    choice
    for member in _members(hint)
    if typing.get_origin(member) is typing.Literal
    for choice in typing.get_args(member)
  ]
  near = nearest(value, choices) if isinstance(value, str) else ''
  if _is_number(value) and not _fits_float32(value):
    near = ' Models compute in float32, where it must be finite and not 0.'
  try:
    shown = repr(value) if shown is None else shown
  except ValueError:  # Python prints no integer of thousands of digits.
    shown = f'<{type(value).__name__}>'
  if dataclasses.is_dataclass(value):
    # Its fields would bury the sentence.
    shown = f'{type(value).__name__}(...)'
  elif len(shown) > _SHOWN:
    shown = f'{shown[:_SHOWN]}...'
  return UserError(f'{path}={shown}: expected {describe(hint)}.{near}')


def validate(instance):
  """Checks every field of a dataclass instance against its annotation.

  An int is accepted where a float is declared; a bool is no int, and what
  float32 cannot hold, such as nan and infinity, is no float. What depends on
  several fields is for the dataclass itself to check, after this call.

  Args:
    instance: of a dataclass; usually `self` in its `__post_init__`.

  Raises:
    UserError: naming class, field, value and what was expected.
  """
  cls = type(instance)
  for name, hint in annotations(cls).items():
    value = getattr(instance, name)
    if not _matches(value, hint):
      raise _refusal(f'{cls.__name__}.{name}', value, hint)


def _tag(instance, hint):
  """Returns what tells a dataclass apart from the others of its union."""
  if len(classes_of(hint)) < 2 and not _is_open(hint):
    return {}
  cls = type(instance)
  if _TYPE_KEY in annotations(cls):
    raise TypeError(
      f'{cls.__name__}.{_TYPE_KEY}: a member of a union cannot have a field of '
      'this name, which tells the members apart'
    )
  tag = _tag_of(cls, hint)
  if tag.startswith(_CONFIG_FILE):
    raise UserError(
      f'{cls.__name__} is defined in a {cls.__module__}: a saved config could'
      ' not be read again, since nobody can import it from there. Move it to a'
      ' module beside it, and import it from there.'
    )
  return {_TYPE_KEY: tag}


def _encode(value, hint):
  """Returns the value as dicts, tuples and scalars, floats being floats."""
  if dataclasses.is_dataclass(value):
    fields = {
      name: _encode(getattr(value, name), sub_hint)
      for name, sub_hint in annotations(type(value)).items()
    }
    return _tag(value, hint) | fields
  member = _bare(next(m for m in _members(hint) if _matches(value, m)))
  if member is float:
    # Equal configs must give equal text, and an int here would keep
    # `--config.x=0.5` from overriding it.
    return float(value)
  if typing.get_origin(member) is tuple:
    return tuple(map(_encode, value, _arguments(member, value)))
  return value


def read_literal(text):
  """Returns the value that a Python literal spells, lists as tuples.

  Text that is no literal, or one that Python refuses, is returned as it is.
  """

  def tuples(value):
    if isinstance(value, list | tuple):
      return tuple(map(tuples, value))
    return value

  try:
    value = ast.literal_eval(text)
    repr(value)  # Python reads longer hexadecimal integers than it writes.
    return tuples(value)
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
    return text


def parse(text, hint):
  """Returns the value that a text spells for a field of this annotation.

  As on a command line: strings without quotes, tuples with or without
  brackets, groups of fields as `{'name': value}`. What is no such value is
  returned as it is, for `_decode` to refuse.

  Args:
    text: what was given.
    hint: the annotation.
  """
  text = text.strip()
  kinds = {_kind(member) for member in _members(hint)}
  if text.lower() == 'none' and _NoneType in kinds:
    return None
  if text.lower() in ('true', 'false') and bool in kinds:
    return text.lower() == 'true'
  if kinds <= {str, _NoneType}:
    return text
  value = read_literal(text)
  if isinstance(value, dict) and dict in kinds:
    return value
  if isinstance(value, str) and float in kinds:  # Such as inf.
    with contextlib.suppress(ValueError):
      return float(value)
  if any(_matches(value, member) for member in _members(hint)):
    return value
  if str in kinds:
    return text
  if tuple in kinds and not isinstance(value, tuple):
    return (value,)
  return value


def _kind(member):
  """Returns the type of what an annotation without alternatives allows."""
  member = _bare(member)
  if dataclasses.is_dataclass(member):
    return dict
  if typing.get_origin(member) is typing.Literal:
    return type(typing.get_args(member)[0])
  return typing.get_origin(member) or member


def field(instance, path, where='', given=types.MappingProxyType({})):
  """Returns the annotation of a nested dataclass's field, by dotted path.

  Args:
    instance: of a dataclass.
    path: such as `model.num_layers`.
    where: what stands before the path in messages, such as `--config.`.
    given: by dotted path, groups of fields that take the instance's place.

  Raises:
    UserError: there is no such field.
  """
  holder, seen, hint = instance, where.strip('-.'), None
  parts = path.split('.')
  for i, part in enumerate(parts):
    if not dataclasses.is_dataclass(holder):
      raise UserError(
        f'{where}{path}: {seen} is {holder!r} and has no {part!r}.'
      )
    hints = annotations(type(holder))
    if part not in hints:
      before = '.'.join(parts[:i])
      meant = _meant(instance, before, '.'.join(parts[i:]))
      near = f' Its fields are {", ".join(hints)}.'
      if meant:
        near = f' Did you mean {" or ".join(map(repr, meant))}?'
      raise UserError(
        f'{where}{path}: {seen or type(holder).__name__} has no field'
        f' {part!r}.{near}'
      )
    held = getattr(holder, part)
    hint, holder = hints[part], given.get('.'.join(parts[: i + 1]), held)
    seen = _join(seen, part)
  return hint


def _paths(instance, group=''):
  """Yields the dotted paths of all fields of a nested dataclass."""
  for name in annotations(type(instance)):
    path, held = _join(group, name), getattr(instance, name)
    yield path
    if dataclasses.is_dataclass(held):
      yield from _paths(held, path)


def _meant(instance, group, path):
  """Returns the paths of which a missing one may be a mistake, 3 at most.

  A field of that name in another group; or the nearest name in its own; or one
  that it abbreviates, as `lr` does; or the nearest of all.

  Args:
    instance: of a nested dataclass.
    group: dotted path of the group that was looked in.
    path: what it has not got.
  """
  name = path.rpartition('.')[2]
  names = {
    p: p.rpartition('.')[2] for p in sorted(_paths(instance), key=_depth)
  }
  own = [n for p, n in names.items() if p == _join(group, n)]

  def initials(name):
    return ''.join(word[0] for word in name.split('_'))

  def near(names):
    return difflib.get_close_matches(name.lower(), names, n=1)

  same = [p for p, n in names.items() if n == name]
  short = [p for p, n in names.items() if initials(n) == name]
  nearest_of_all = [p for p, n in names.items() if n in near(names.values())]
  return (
    same or [_join(group, n) for n in near(own)] or short or nearest_of_all
  )[:3]


def _depth(path):
  return path.count('.')


def override(instance, texts, where='--config.'):
  """Returns a copy of a nested dataclass with fields as texts say.

  All are set at once, so that they need only fit each other in the end; fields
  of a group that is given as a whole, before or after them, are set in it.

  Args:
    instance: of a dataclass; stays as it is.
    texts: pairs of a dotted path and what to set the field to, as `parse` reads
      it.
    where: what stands before the paths in messages.

  Raises:
    UserError: there is no such field, or a value that it does not allow.
  """
  changes = {}

  def set_field(path, text, *, group):
    hint = field(instance, path, where, changes)
    value = parse(text, hint)
    if isinstance(value, dict) != group:
      return
    if group:
      changes[path] = _decode_group(value, hint, where + path)
      return
    try:
      changes[path] = _decode(value, hint, path)
    except UserError as error:
      raise _refusal(where + path, value, hint, text) from error

  # Set groups first, outer before inner: a group decides which fields exist.
  groups = [pair for pair in texts if pair[1].lstrip().startswith('{')]
  for path, text in sorted(groups, key=lambda pair: pair[0].count('.')):
    set_field(path, text, group=True)
  for path, text in texts:
    set_field(path, text, group=False)
  return replace(instance, changes)


def _decode_group(value, hint, path):
  """Decodes a group of fields, which says which class it is of if it must."""
  classes = classes_of(hint)
  if (len(classes) > 1 or _is_open(hint)) and _TYPE_KEY not in value:
    names = typing.Literal[tuple(c.__name__ for c in classes)]
    raise UserError(
      f'{path}.{_TYPE_KEY} is missing: say which group of fields is meant,'
      f' {describe(names)}.'
    )
  return _decode(value, hint, path)


def _join(path, name):
  return f'{path}.{name}' if path else name


@contextlib.contextmanager
def _inside(path):
  """Prefixes a UserError with the path, which the raising class cannot know."""
  try:
    yield
  except UserError as error:
    raise UserError(f'{path}: {error}' if path else str(error)) from error


def _decode_dataclass(cls, mapping, path):
  hints = annotations(cls)
  for key in mapping:
    if key not in hints:
      hint = nearest(key, hints) or f' Its fields are {", ".join(hints)}.'
      raise UserError(
        f'{_join(path, key)}: {cls.__name__} has no field {key!r}.{hint}'
      )
  values = {}
  for field in dataclasses.fields(cls):
    where = _join(path, field.name)
    if field.name in mapping:
      values[field.name] = _decode(
        mapping[field.name], hints[field.name], where
      )
    elif (
      field.default is dataclasses.MISSING
      and field.default_factory is dataclasses.MISSING
    ):
      raise UserError(
        f'{where} is missing: expected {describe(hints[field.name])}.'
      )
  with _inside(path):
    return cls(**values)


def _decode(value, hint, path):
  """The inverse of `_encode`, which also takes lists."""
  members, classes = _members(hint), classes_of(hint)
  by_name = {_tag_of(c, hint): c for c in classes}
  several = len(classes) > 1 or _is_open(hint)
  if isinstance(value, list):
    value = tuple(value)
  if isinstance(value, collections.abc.Mapping) and classes:
    # The first class if none is named: then a field can become a union without
    # spoiling configs that were saved before.
    cls = classes[0]
    if several and _TYPE_KEY in value:
      value = dict(value)
      kind = value.pop(_TYPE_KEY)
      if kind not in tuple(by_name):  # What is asked for may have no hash.
        raise _no_class(_join(path, _TYPE_KEY), kind, hint)
      cls = by_name[kind]
    return _decode_dataclass(cls, value, path)
  if len(members) > 1:
    fitting = [m for m in members if _matches(value, m)]
    for member in fitting or members:
      try:
        return _decode(value, member, path)
      except UserError:
        continue
    raise _refusal(path, value, hint)
  if typing.get_origin(hint) is tuple and isinstance(value, tuple):
    args = _arguments(hint, value)
    if len(args) != len(value):
      raise _refusal(path, value, hint)
    return tuple(
      _decode(element, arg, f'{path}[{i}]')
      for i, (element, arg) in enumerate(zip(value, args, strict=True))
    )
  if not _matches(value, hint):
    raise _refusal(path, value, hint)
  return float(value) if _bare(hint) is float else value


def from_dict(cls, mapping):
  """Returns an instance of dataclass `cls` with the values of a mapping.

  Fields that are absent take the default of their dataclass. Lists are taken
  for tuples, and integers for floats. A field that may hold one of several
  dataclasses has a key `type`, the class name.

  Args:
    cls: the dataclass.
    mapping: values by name, those of nested dataclasses being mappings too.

  Raises:
    UserError: for an unknown or missing field, a wrong type, a bad choice, or
      whatever the dataclass itself refuses; it names the dotted path.
  """
  if not isinstance(mapping, collections.abc.Mapping):
    raise UserError(
      f'the config is a {type(mapping).__name__}: expected the fields of'
      f' {cls.__name__}.'
    )
  return _decode_dataclass(cls, mapping, '')


def from_known(cls, mapping, where):
  """Returns an instance of `cls` from those of a mapping's keys that it has.

  For a file of another program, of which `cls` lists all that is read, with the
  types and the defaults that it has there; otherwise as `from_dict`.

  Args:
    cls: the dataclass.
    mapping: values by name.
    where: what is read, for messages.
  """
  known = {k: mapping[k] for k in annotations(cls) if k in mapping}
  try:
    return from_dict(cls, known)
  except (UserError, OverflowError, RecursionError) as error:
    raise UserError(f'{where}: {error}') from error


def to_json(instance):
  """Returns a dataclass instance as indented JSON, fields as declared."""
  return json.dumps(_encode(instance, type(instance)), indent=2) + '\n'


def from_json(cls, text):
  """Returns an instance of dataclass `cls` from what `to_json` wrote.

  Raises:
    UserError: if the text is no JSON object, or as in `from_dict`.
  """
  expected = f'expected what mod_jax.config.to_json writes for a {cls.__name__}'
  try:
    decoded = json.loads(text)
  # ValueError also stands for integers of thousands of digits.
  except (ValueError, RecursionError) as error:
    raise UserError(
      f'the saved config is not JSON ({error}): {expected}.'
    ) from error
  try:
    return from_dict(cls, decoded)
  except (OverflowError, RecursionError) as error:
    raise UserError(
      f'the saved config is no config ({error}): {expected}.'
    ) from error


def config_getter(variants):
  """Returns the `get_config` of a config file, from its table of variants.

  Args:
    variants: functions that build the experiments, by name; '' is the one that
      a command line without a name means.
  """

  def get_config(variant=''):
    return choose(variant, variants)()

  return get_config


def sibling(file, name):
  """Returns the module of a config file beside another: they are no package.

  Args:
    file: `__file__` of the one that asks.
    name: path of the other from there, without suffix.
  """
  return load(pathlib.Path(file).parent / f'{name}.py')


def load(path):
  """Returns the module of a config file, executed anew.

  Raises:
    UserError: it is no Python file.
  """
  path = pathlib.Path(path).resolve()
  spec = importlib.util.spec_from_file_location(f'{_CONFIG_FILE}{path}', path)
  if spec is None:
    raise UserError(f'{path} is no config file: expected Python, FILE.py.')
  module = importlib.util.module_from_spec(spec)
  # Dataclasses and `inspect` look up the module of a class there.
  sys.modules[spec.name] = module
  # As of a script: what lies beside it can be imported.
  sys.path.append(str(path.parent))
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(str(path.parent))
  return module


def diff(a, b):
  """Returns one line, `model.width: 128 -> 256`, per field that differs."""
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


def replace(instance, changes):
  """Returns a copy of a nested dataclass with some fields changed.

  Args:
    instance: of a dataclass; stays as it is.
    changes: values by dotted path, `{'model.num_layers': 2}`.

  Raises:
    UserError: for an unknown field or a value that the dataclass refuses.
  """
  return _replace(instance, changes, '')


def _replace(instance, changes, where):
  own, nested = {}, {}
  for path, value in changes.items():
    first, _, rest = path.partition('.')
    if not dataclasses.is_dataclass(instance) or (
      first not in annotations(type(instance))
    ):
      field(instance, path, f'{where}.' if where else '')  # Says so.
    if rest:
      nested.setdefault(first, {})[rest] = value
    else:
      own[first] = value
  for name, inner in nested.items():
    held = own.get(name, getattr(instance, name))
    own[name] = _replace(held, inner, _join(where, name))
  with _inside(where):
    return dataclasses.replace(instance, **own)
