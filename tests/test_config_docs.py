"""What is said of configs' fields comes from where they are declared."""

import dataclasses

import pytest

from mod_jax import config as config_lib
from mod_jax import config_docs
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
  """A base.

  Attributes:
    told: in the docstring,
      on two lines.
    other: likewise.

  Not this: nothing.
  """

  told: int = 1
  other: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  size: config_lib.Size = 3  # Behind it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Base):
  """Without attributes."""

  # Above it,
  # on two lines.
  above: tuple[int, ...] = (
    1,
    2,
  )
  silent: bool = False

  inner: Inner | None = Inner()
  nothing: Inner | None = None  # What may be there.
  other: int = 2  # Said anew.

  def method(self):
    local: int = 1  # No field.
    return local


FILE = """
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mine:
  power: int = 2  # Of the norm.


def get_config():
  return Mine()
"""


def test_a_file_of_a_class_and_nothing_else(tmp_path):
  (tmp_path / 'mine.py').write_text(FILE)
  config = config_lib.load(tmp_path / 'mine.py').get_config()
  assert config_docs.page(tmp_path / 'mine.py', config) == (
    '--config.power=2\n    Of the norm. (an integer)'
  )


def test_the_listing_of_a_config():
  assert config_docs.listing(Outer(above=(7,))).splitlines() == [
    '--config.told=1',
    '    in the docstring, on two lines. (an integer)',
    '--config.other=2',
    '    Said anew. (an integer)',
    '--config.above=(7,)',
    '    Above it, on two lines. (a tuple of integers)',
    '--config.silent=False',
    '    (true or false)',
    '--config.inner=Inner',
    '    (Inner or None)',
    '--config.inner.size=3',
    '    Behind it. (an integer from 1 to 1,048,576)',
    '--config.nothing=None',
    '    What may be there. (Inner or None)',
  ]


def _classes(cls, seen):
  # Other tests have slots and scores of their own.
  if cls not in seen and cls.__module__.startswith('mod_jax.'):
    seen.append(cls)
    for hint in config_lib.annotations(cls).values():
      for inner in config_lib.classes_of(hint).values():
        _classes(inner, seen)
  return seen


@pytest.mark.parametrize('cls', _classes(ExperimentConfig, []))
def test_every_field_says_what_it_means(cls):
  silent = {
    name
    for name, hint in config_lib.annotations(cls).items()
    # The class of a config says what it is for.
    if not config_lib.classes_of(hint)
  } - config_docs.meanings(cls).keys()
  assert not silent
