"""Configs: frozen dataclasses, set on command lines, saved as JSON.

A config is a frozen, keyword-only dataclass whose `__post_init__` calls
`validate(self)`. Its fields are bool, int, float, str, `Literal` choices,
tuples of these, other such dataclasses, and `X | None` or wider unions of them.
`Annotated` gives the `Range` of a number, as in the aliases below; conditions
on several fields are checked in `__post_init__`.
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
# The JSON key that names the class, in a union of dataclasses.
_TYPE_KEY = 'type'
# Smallest and largest positive normal number of float32, in which models
# compute: larger ones overflow to infinity, smaller ones may be flushed to 0.
_FLOAT32 = (2.0**-126, (1 - 2.0**-24) * 2.0**128)
# Prefix of the module names of config files.
_CONFIG_FILE = 'config file '
_SHOWN = 200  # Characters of an invalid value to show in a message.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """Bounds of a number, named as the functions of `operator`."""

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


# Generous limits; products of a few fit in int64.
Size = Annotated[int, Range(ge=1, le=2**20)]  # Of an array's axis.
Width = Annotated[int, Range(ge=1, le=2**17)]  # Features, before FFNs expand.
Count = Annotated[int, Range(ge=0, le=10**9)]  # Such as steps; fits in int32.
PositiveCount = Annotated[int, Range(ge=1, le=10**9)]
# A number of blocks or the like, which are traced one by one; and an index.
Unrolled = Annotated[int, Range(ge=1, le=1000)]
Layer = Annotated[int, Range(ge=0, le=999)]
Pixels = Annotated[int, Range(ge=1, le=2**14)]  # Along a side.
Seed = Annotated[int, Range(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Range(ge=0, le=1024)]  # Threads or processes.
Positive = Annotated[float, Range(gt=0)]
Factor = Annotated[float, Range(gt=0, le=1000)]  # On activations.
Weight = Annotated[float, Range(ge=0, le=10**6)]  # Of a loss.
Fraction = Annotated[float, Range(gt=0, le=1)]  # A part, not empty.
Proper = Annotated[float, Range(gt=0, lt=1)]  # A part, not the whole.
Probability = Annotated[float, Range(ge=0, le=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
# The decay of a moving average. Larger ones may round to 1 in float32, and then
# the average never moves.
Decay = Annotated[float, Range(ge=0, le=0.999999)]
# Added to a divisor; its square root and inverse are finite.
Epsilon = Annotated[float, Range(ge=1e-30)]
Temperature = Annotated[float, Range(ge=1e-4, le=1e4)]  # Divides logits.
# A part of a run: a number of steps, or a fraction of all steps.
Steps = Count | Proper


def steps_of(part, num_steps):
  """Converts `Steps` to a number of steps; a fraction never gives all."""
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
    UserError: if `name` is not in `table`; the message calls it a `what`.
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

  An abstract one stands for all its subclasses that are imported.
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
  """Whether an annotation allows subclasses of other packages."""
  members = filter(dataclasses.is_dataclass, _members(hint))
  return any(map(inspect.isabstract, members))


def _tag_of(cls, hint):
  """Returns the name of a class in saved configs.

  Classes of other packages are qualified by their module.
  """
  if _is_open(hint) and cls.__module__.split('.')[0] != __name__.split('.')[0]:
    return f'{cls.__module__}:{cls.__qualname__}'
  return cls.__name__


def trust(modules):
  """Imports modules whose classes saved configs may then name.

  Reading a config imports nothing, since its author could name any module and
  so run code; the modules of its classes must be imported before.

  Args:
    modules: dotted names.

  Raises:
    UserError: a module cannot be imported.
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
  """Returns the UserError for a `type` that names no imported class."""
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
  """Describes in words the values that an annotation allows."""
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
      elements = describe(args[0], plural=True)
    else:
      elements = '(' + ', '.join(describe(arg) for arg in args) + ')'
    return f'tuples of {elements}' if plural else f'a tuple of {elements}'
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
  """Whether a value has the type, and lies in the range, of an annotation."""
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
  """Returns the UserError for a value that the annotation does not allow.

  `shown` is the value as the user wrote it.
  """
  for member in _members(hint) if shown is None else ():
    if typing.get_origin(member) is tuple and isinstance(value, tuple):
      # Naming the first wrong element is clearer than showing all.
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
  except ValueError:  # Python refuses to print huge integers.
    shown = f'<{type(value).__name__}>'
  if dataclasses.is_dataclass(value):
    # All its fields would be too long.
    shown = f'{type(value).__name__}(...)'
  elif len(shown) > _SHOWN:
    shown = f'{shown[:_SHOWN]}...'
  return UserError(f'{path}={shown}: expected {describe(hint)}.{near}')


def validate(instance):
  """Checks every field of a dataclass instance against its annotation.

  An int is accepted where a float is declared; a bool is no int, and a float
  must be finite and not too small or large for float32. Conditions on several
  fields are for the dataclass itself to check, after this call.

  Args:
    instance: of a dataclass; usually `self` in its `__post_init__`.

  Raises:
    UserError: names class, field, value and what was expected.
  """
  cls = type(instance)
  for name, hint in annotations(cls).items():
    value = getattr(instance, name)
    if not _matches(value, hint):
      raise _refusal(f'{cls.__name__}.{name}', value, hint)


def _tag(instance, hint):
  """Returns `{'type': name}` for a member of a union of dataclasses."""
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
  """Returns the value as dicts, tuples and scalars; converts ints to float."""
  if dataclasses.is_dataclass(value):
    fields = {
      name: _encode(getattr(value, name), sub_hint)
      for name, sub_hint in annotations(type(value)).items()
    }
    return _tag(value, hint) | fields
  member = _bare(next(m for m in _members(hint) if _matches(value, m)))
  if member is float:
    # Equal configs must give equal text, though float fields accept ints.
    return float(value)
  if typing.get_origin(member) is tuple:
    return tuple(map(_encode, value, _arguments(member, value)))
  return value


def read_literal(text):
  """Evaluates a Python literal; lists become tuples.

  Text that cannot be evaluated is returned unchanged.
  """

  def tuples(value):
    if isinstance(value, list | tuple):
      return tuple(map(tuples, value))
    return value

  try:
    value = ast.literal_eval(text)
    repr(value)  # Fails for hexadecimal integers too long to print.
    return tuples(value)
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
    return text


def parse(text, hint):
  """Parses text from a command line as a value of a field.

  Strings have no quotes, tuples may lack brackets, groups of fields are
  `{'name': value}`. The value is not validated: that is left to `_decode`.

  Args:
    text: the text.
    hint: the annotation of the field.
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
  """Returns the type of values of an annotation that is no union."""
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
    where: prefix of the path in messages, such as `--config.`.
    given: by dotted path, dataclasses that replace those of the instance.

  Raises:
    UserError: there is no such field.
  """
  # Messages name the outermost config as flags do: `config`.
  holder, parent, hint = instance, '', None
  if where.endswith('.'):
    parent = where.strip('-.')
  parts = path.split('.')
  for i, part in enumerate(parts):
    if not dataclasses.is_dataclass(holder):
      raise UserError(
        f'{where}{path}: {parent} is {holder!r} and has no {part!r}.'
      )
    hints = annotations(type(holder))
    if part not in hints:
      group = '.'.join(parts[:i])
      similar = _meant(instance, group, '.'.join(parts[i:]))
      near = f' Its fields are {", ".join(hints)}.'
      if similar:
        near = f' Did you mean {" or ".join(map(repr, similar))}?'
      raise UserError(
        f'{where}{path}: {parent or type(holder).__name__} has no field'
        f' {part!r}.{near}'
      )
    value = getattr(holder, part)
    hint, holder = hints[part], given.get('.'.join(parts[: i + 1]), value)
    parent = _join(parent, part)
  return hint


def _paths(instance, group=''):
  """Yields the dotted paths of all fields of a nested dataclass."""
  for name in annotations(type(instance)):
    path, value = _join(group, name), getattr(instance, name)
    yield path
    if dataclasses.is_dataclass(value):
      yield from _paths(value, path)


def _meant(instance, group, path):
  """Returns at most 3 paths that may be meant by one that does not exist.

  Fields of that name in other groups; or the most similar name in its group; or
  names that it abbreviates by initials, as `lr`; or the most similar of all.

  Args:
    instance: of a nested dataclass.
    group: dotted path of the innermost group that exists.
    path: the rest of the path, which does not exist.
  """
  name = path.rpartition('.')[2]
  names = {
    p: p.rpartition('.')[2] for p in sorted(_paths(instance), key=_depth)
  }
  siblings = [n for p, n in names.items() if p == _join(group, n)]

  def initials(name):
    return ''.join(word[0] for word in name.split('_'))

  def most_similar(names):
    return difflib.get_close_matches(name.lower(), names, n=1)

  same_name = [p for p, n in names.items() if n == name]
  abbreviated = [p for p, n in names.items() if initials(n) == name]
  nearest_of_all = [
    p for p, n in names.items() if n in most_similar(names.values())
  ]
  return (
    same_name
    or [_join(group, n) for n in most_similar(siblings)]
    or abbreviated
    or nearest_of_all
  )[:3]


def _depth(path):
  return path.count('.')


def override(instance, texts, where='--config.'):
  """Returns a copy of a nested dataclass with fields parsed from texts.

  All fields are set at once, so that only the final combination must be valid.
  Whole groups are set first, whatever the order, and single fields in them.

  Args:
    instance: of a dataclass; not modified.
    texts: pairs of a dotted path and the text of its value, for `parse`.
    where: prefix of the paths in messages.

  Raises:
    UserError: a field does not exist, or does not allow its value.
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
  """Decodes a group of fields; the key `type` is required in a union."""
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
  """Prefixes UserErrors with the path, which the class does not know."""
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
  """The inverse of `_encode`; also accepts lists for tuples."""
  members, classes = _members(hint), classes_of(hint)
  by_name = {_tag_of(c, hint): c for c in classes}
  several = len(classes) > 1 or _is_open(hint)
  if isinstance(value, list):
    value = tuple(value)
  if isinstance(value, collections.abc.Mapping) and classes:
    # Defaults to the first class, so that a field can become a union without
    # breaking saved configs.
    cls = classes[0]
    if several and _TYPE_KEY in value:
      value = dict(value)
      kind = value.pop(_TYPE_KEY)
      if kind not in tuple(by_name):  # Not the dict: `kind` may be unhashable.
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

  Absent fields take the default of their dataclass. Lists are accepted for
  tuples, and integers for floats. A field that may hold one of several
  dataclasses has a key `type`, the class name.

  Args:
    cls: the dataclass.
    mapping: values by name, those of nested dataclasses being mappings too.

  Raises:
    UserError: for an unknown or missing field, a wrong type or choice, or if
      the dataclass itself raises it; the message names the dotted path.
  """
  if not isinstance(mapping, collections.abc.Mapping):
    raise UserError(
      f'the config is a {type(mapping).__name__}: expected the fields of'
      f' {cls.__name__}.'
    )
  return _decode_dataclass(cls, mapping, '')


def from_known(cls, mapping, where):
  """Returns an instance of `cls` as `from_dict`; ignores unknown keys.

  For files of other programs: `cls` declares the keys that are used.

  Args:
    cls: the dataclass.
    mapping: values by name.
    where: name of the source, for messages.
  """
  fields = {k: mapping[k] for k in annotations(cls) if k in mapping}
  try:
    return from_dict(cls, fields)
  except (UserError, OverflowError, RecursionError) as error:
    raise UserError(f'{where}: {error}') from error


def to_json(instance):
  """Returns a dataclass instance as indented JSON, in order of declaration."""
  return json.dumps(_encode(instance, type(instance)), indent=2) + '\n'


def from_json(cls, text):
  """Returns an instance of dataclass `cls` from the output of `to_json`.

  Raises:
    UserError: if the text is no JSON object, or does not fit `cls`.
  """
  expected = f'expected what mod_jax.config.to_json writes for a {cls.__name__}'
  try:
    decoded = json.loads(text)
  # ValueError is also raised for huge integers.
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
    variants: functions that build the experiments, by name; '' is the default.
  """

  def get_config(variant=''):
    return choose(variant, variants)()

  return get_config


def sibling(file, name):
  """Loads a config file beside another; they are in no package.

  Args:
    file: `__file__` of the calling config file.
    name: path of the other, relative to its directory, without suffix.
  """
  return load(pathlib.Path(file).parent / f'{name}.py')


def load(path):
  """Loads a config file as a module, without caching it.

  Raises:
    UserError: it is not a Python file.
  """
  path = pathlib.Path(path).resolve()
  spec = importlib.util.spec_from_file_location(f'{_CONFIG_FILE}{path}', path)
  if spec is None:
    raise UserError(f'{path} is no config file: expected Python, FILE.py.')
  module = importlib.util.module_from_spec(spec)
  # Dataclasses and `inspect` look up the modules of classes in it.
  sys.modules[spec.name] = module
  # As for scripts, modules in its directory can be imported.
  sys.path.append(str(path.parent))
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(str(path.parent))
  return module


def diff(a, b):
  """Returns a line such as `model.width: 128 -> 256` per differing field."""
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
    instance: of a dataclass; not modified.
    changes: values by dotted path, `{'model.num_layers': 2}`.

  Raises:
    UserError: for an unknown field or an invalid value.
  """
  return _replace(instance, changes, '')


def _replace(instance, changes, where):
  values, nested = {}, {}
  for path, value in changes.items():
    first, _, rest = path.partition('.')
    if not dataclasses.is_dataclass(instance) or (
      first not in annotations(type(instance))
    ):
      field(instance, path, f'{where}.' if where else '')  # Raises UserError.
    if rest:
      nested.setdefault(first, {})[rest] = value
    else:
      values[first] = value
  for name, inner in nested.items():
    old = values.get(name, getattr(instance, name))
    values[name] = _replace(old, inner, _join(where, name))
  with _inside(where):
    return dataclasses.replace(instance, **values)
