import dataclasses
import functools
import json
import math
import os.path
from typing import Annotated, Literal

import hypothesis
from hypothesis import strategies as st
import pytest

from mod_jax import config
from mod_jax.data.images import ImageDataConfig
from mod_jax.errors import UserError
from mod_jax.models.vit import ViTConfig
from mod_jax.sweeps.plan import SweepConfig
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  capacity: float = 0.125
  gate: Literal['raw', 'sigmoid', 'one_plus_tanh'] = 'raw'

  def __post_init__(self):
    config.validate(self)
    if not 0 < self.capacity <= 1:
      raise UserError(f'capacity={self.capacity}: expected a number in (0, 1].')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LM:
  num_layers: int = 2
  width: int = 64
  rate: float = 1
  tied: bool = True
  kv_heads: int | None = None
  path: str | None = None
  clip: float | None = 1.0
  capacities: float | tuple[float, ...] = 0.5
  mesh: tuple[int, ...] = (1, 2)
  stages: tuple[tuple[int, float], ...] = ()
  pair: tuple[str, int] = ('a', 1)
  dtype: Literal['float32', 'bfloat16'] | None = None
  order: Literal[1, 2] = 1
  routing: Routing | None = None

  def __post_init__(self):
    config.validate(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViT:
  patch: int = 16

  def __post_init__(self):
    config.validate(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  steps: int
  model: LM | ViT = LM()

  def __post_init__(self):
    config.validate(self)


RICH = Experiment(
  steps=7,
  model=LM(
    rate=1e-3,
    tied=False,
    kv_heads=2,
    path='data/*.txt',
    clip=None,
    capacities=(1, 0.1),
    mesh=(),
    stages=((0, 1.0), (10, 1 / 3)),
    dtype='bfloat16',
    routing=Routing(capacity=math.pi / 4, gate='sigmoid'),
  ),
)
EXAMPLES = [
  Experiment(steps=1),
  RICH,
  Experiment(steps=1, model=ViT(patch=8)),
]


FLOATS = st.floats(
  width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False
)


def refusal(function, *args, **kwargs):
  """Returns the message of the UserError that the call must raise."""
  with pytest.raises(UserError) as caught:
    function(*args, **kwargs)
  message = str(caught.value)
  assert '\n' not in message
  return message


class TestValidate:
  @pytest.mark.parametrize(
    ('field', 'value', 'expected'),
    [
      ('num_layers', 2.0, 'an integer'),
      ('num_layers', True, 'an integer'),
      ('rate', 'fast', 'a number'),
      ('rate', False, 'a number'),
      ('tied', 1, 'true or false'),
      ('kv_heads', '2', 'an integer or None'),
      ('clip', -math.inf, 'a number or None'),
      ('capacities', 'x', 'a number or a tuple of numbers'),
      ('mesh', [1, 2], 'a tuple of integers'),
      ('stages', 1, 'a tuple of tuples of (an integer, a number)'),
      ('pair', ('a', 1, 1), 'a tuple of (a string, an integer)'),
      ('dtype', 'fp8', "one of 'float32', 'bfloat16' or None"),
      ('order', True, 'one of 1, 2'),
      ('routing', 0.5, 'Routing or None'),
    ],
  )
  def test_names_field_value_and_what_is_expected(self, field, value, expected):
    message = refusal(LM, **{field: value})
    assert message.startswith(f'LM.{field}={value!r}: expected {expected}.')

  @pytest.mark.parametrize(
    ('field', 'value', 'element'),
    [
      ('mesh', (1, True), 'mesh[1]=True'),
      ('stages', ((0, 1.0, 2),), 'stages[0]=(0, 1.0, 2)'),
      ('stages', ((0, 'x'),), "stages[0][1]='x'"),
      ('path', 10**4000, 'path=1000'),
    ],
  )
  def test_names_the_element_and_in_short(self, field, value, element):
    message = refusal(LM, **{field: value})
    assert message.startswith(f'LM.{element}')
    assert len(message) < 350

  def test_says_why_a_number_is_none(self):
    for value in (math.nan, math.inf, 10**39, 1e39, -1e-39, 1e-320):
      assert 'finite and not 0' in refusal(LM, rate=value)
    for value in ('fast', None):
      assert 'finite' not in refusal(LM, rate=value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranges:
  layers: Annotated[int, config.Range(ge=1, le=2000)] = 1
  heads: Annotated[int, config.Range(ge=1, le=8)] | None = None
  share: Annotated[float, config.Range(gt=0, le=1)] = 1.0
  decay: Annotated[float, config.Range(ge=0, lt=1)] = 0.0
  budget: Annotated[float, config.Range(gt=0, lt=1)] = 0.5
  rate: Annotated[float, config.Range(gt=0)] = 1e-3
  weight: Annotated[float, config.Range(ge=0)] = 0.0
  mesh: tuple[Annotated[int, config.Range(ge=-1, le=8)], ...] = ()
  each: config.Fraction | tuple[config.Fraction, ...] = 1.0

  def __post_init__(self):
    config.validate(self)


class TestRanges:
  @pytest.mark.parametrize(
    ('field', 'inside', 'outside', 'expected'),
    [
      ('layers', (1, 2000), (0, 2001), 'an integer from 1 to 2,000'),
      ('heads', (1, 8, None), (0, 9), 'an integer from 1 to 8 or None'),
      ('mesh', ((), (8, -1)), (9,), 'a tuple of integers from -1 to 8'),
      ('share', (1e-9, 1, 1.0), (0, -1.0, 1.1), 'a number in (0, 1]'),
      ('decay', (0, 0.99), (-1e-9, 1.0, 1), 'a number in [0, 1)'),
      ('budget', (0.01, 0.99), (0.0, 1), 'a number in (0, 1)'),
      ('rate', (1e-30, 1e38), (0, -1.0), 'a number above 0'),
      ('weight', (0, 1e38), (-1e-9,), 'a number of 0 or more'),
      (
        *('each', (0.1, (0.1, 1)), (0.0,)),
        'a number in (0, 1] or a tuple of numbers in (0, 1]',
      ),
    ],
  )
  def test_ends(self, field, inside, outside, expected):
    for value in inside:
      assert getattr(Ranges(**{field: value}), field) == value
    for value in outside:
      message = refusal(Ranges, **{field: value})
      assert message == f'Ranges.{field}={value!r}: expected {expected}.'


class TestRoundTrip:
  @pytest.mark.parametrize('experiment', EXAMPLES)
  def test_json(self, experiment):
    text = config.to_json(experiment)
    back = config.from_json(Experiment, text)
    assert back == experiment
    assert hash(back) == hash(experiment)
    assert config.to_json(back) == text

  @hypothesis.given(
    rate=FLOATS,
    capacities=FLOATS | st.lists(FLOATS).map(tuple),
    path=st.none() | st.text(),
    stages=st.lists(st.tuples(st.integers(), FLOATS)).map(tuple),
    clip=st.none() | FLOATS,
  )
  def test_every_value_comes_back(self, **values):
    lm = LM(**values)
    assert config.from_json(LM, config.to_json(lm)) == lm

  def test_what_was_saved_before_a_field_or_a_choice_existed(self):
    old = {'steps': 1, 'model': {'width': 8}}
    assert config.from_dict(Experiment, old).model == LM(width=8)


@pytest.mark.parametrize(
  ('path', 'meant'),
  [
    ('optimizer.lr', "'optimizer.learning_rate'"),
    ('train.warmup_steps', "'optimizer.warmup_steps'"),
    ('optimizer.learning_rat', "'optimizer.learning_rate'"),
    ('batch_size', "'train.batch_size' or 'evaluation.batch_size'"),
  ],
)
def test_a_misspelt_field_is_looked_for_in_the_whole_config(path, meant):
  experiment = ExperimentConfig(
    model=ViTConfig(), data=ImageDataConfig(image_size=224)
  )
  with pytest.raises(UserError) as error:
    config.override(experiment, [(path, '1')])
  assert f'Did you mean {meant}?' in str(error.value)


def test_groups_in_a_tuple_are_set_as_one_is():
  sweep = config.override(
    SweepConfig(), [('groups', "({'name': 'a'}, {'name': 'b'})")]
  )
  assert [group.name for group in sweep.groups] == ['a', 'b']
  for text in ('count, sum', "count,'sum'", "('count', 'sum')"):
    assert config.parse(text, tuple[str, ...]) == ('count', 'sum')
  assert config.parse("'a,b'", tuple[str, ...]) == ('a,b',)
  assert config.parse("dog's,cat", tuple[str, ...]) == ("dog's", 'cat')


def test_paths_are_compared_by_their_last_part():
  def nearest(other):
    return config.nearest('/of/deit', [other], os.path.basename)

  assert nearest('/of/deits') == " Did you mean '/of/deits'?"
  assert not nearest('/of/notes')


class TestFromDict:
  @pytest.mark.parametrize(
    ('path', 'value', 'words'),
    [
      ('model.num_layer', 3, "Did you mean 'num_layers'?"),
      ('zzz', 3, 'Its fields are steps, model.'),
      ('model.routing.gate', 'sigmoyd', "Did you mean 'sigmoid'?"),
      ('model.routing', {'capacity': 2}, 'capacity=2.0: expected a number in'),
      ('model.mesh', [1, 'x'], "[1]='x': expected an integer."),
      ('model.stages', [[1]], '[0]=(1,): expected a tuple of (an integer'),
      ('model.type', 'Vit', "'LM', 'ViT'. Did you mean 'ViT'?"),
      ('steps', None, 'expected an integer.'),
    ],
  )
  def test_refusal_names_the_dotted_path(self, path, value, words):
    values = json.loads(config.to_json(RICH))
    *groups, name = path.split('.')
    holder = functools.reduce(dict.__getitem__, groups, values)
    holder[name] = value
    message = refusal(config.from_dict, Experiment, values)
    assert message.startswith(path)
    assert words in message

  def test_refuses_what_is_missing_or_no_group_of_fields(self):
    message = refusal(config.from_dict, Experiment, {})
    assert message == 'steps is missing: expected an integer.'
    for text in ('', '{', '[]', '3', 'null'):
      assert refusal(config.from_json, Experiment, text)


class TestOverride:
  """What `--config.path=text` does."""

  @pytest.mark.parametrize(
    ('path', 'text', 'value'),
    [
      ('rate', '2', 2.0),
      ('tied', 'False', False),
      ('kv_heads', 'none', None),
      ('path', '123', '123'),
      ('path', " 'a' ", " 'a' "),
      ('capacities', '1,.2', (1.0, 0.2)),
      ('mesh', '4', (4,)),
      ('mesh', '()', ()),
      ('stages', '((0,1),(5,.5))', ((0, 1.0), (5, 0.5))),
      ('pair', "'b',2", ('b', 2)),
      ('dtype', 'bfloat16', 'bfloat16'),
      ('order', '2', 2),
      ('routing', "{'gate': 'sigmoid'}", Routing(gate='sigmoid')),
    ],
  )
  def test_values(self, path, text, value):
    changed = config.override(LM(routing=Routing()), [(path, text)])
    assert changed == dataclasses.replace(
      LM(routing=Routing()), **{path: value}
    )
    assert type(getattr(changed, path)) is type(value)

  def test_groups_need_to_fit_in_the_end_only(self):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Pair:
      a: LM | ViT = LM()
      b: LM | ViT = LM()

      def __post_init__(self):
        if type(self.a) is not type(self.b):
          raise UserError('a and b differ.')

    vit = "{'type': 'ViT'}"
    changed = config.override(
      Pair(), [('a', vit), ('b', vit), ('b.patch', '8')]
    )
    assert changed == Pair(a=ViT(), b=ViT(patch=8))

  def test_a_group_in_a_group_in_any_order(self):
    texts = [
      ('model.routing.capacity', '0.5'),
      ('model.routing', "{'gate': 'sigmoid'}"),
      ('model', "{'type': 'LM', 'width': 8}"),
    ]
    routing = Routing(capacity=0.5, gate='sigmoid')
    for order in (texts, texts[::-1]):
      changed = config.override(EXAMPLES[2], order)
      assert changed.model == LM(width=8, routing=routing)

  def test_a_group_needs_its_type(self):
    # Unlike in JSON, where it may be of before there was a choice.
    for text in ('{}', "{'width': 8}"):
      assert refusal(config.override, RICH, [('model', text)]) == (
        '--config.model.type is missing: say which group of fields is meant,'
        " one of 'LM', 'ViT'."
      )

  @pytest.mark.parametrize(
    ('path', 'text', 'words'),
    [
      ('model.mesh', '1,x', 'mesh=1,x: expected a tuple of integers.'),
      ('model.width.x', '1', 'config.model.width is 64 and has no'),
      ('model', "{'type': []}", 'config.model.type=(): expected one of'),
      ('model.routing.capacity', '2', 'model.routing: capacity=2.0: expected'),
      ('model.width', '-' * 9000, '...: expected an integer.'),
    ],
  )
  def test_refusals(self, path, text, words):
    assert words in refusal(config.override, RICH, [(path, text)])

  def test_a_group_that_is_none_has_no_fields(self):
    changes = {'model.routing.capacity': 0.5}
    message = refusal(config.replace, Experiment(steps=1), changes)
    assert "model.routing is None and has no 'capacity'" in message


def test_differences_are_a_line_per_field():
  changes = {'steps': 8, 'model.routing.gate': 'raw'}
  assert config.diff(RICH, config.replace(RICH, changes)) == [
    'steps: 7 -> 8',
    "model.routing.gate: 'sigmoid' -> 'raw'",
  ]
  assert config.diff(LM(rate=1), LM(rate=1.0)) == []
  assert config.diff(LM(), LM(routing=Routing())) == [
    "routing: None -> Routing(capacity=0.125, gate='raw')"
  ]
  assert config.diff(LM(), ViT()) == ['type: LM -> ViT']


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('[1, [2, 3]]', (1, (2, 3))),
    ("{'a': 1}", {'a': 1}),
    ('0x10', 16),
    *(
      (text, text)
      for text in (
        *('', 'a.txt', '1 + 1', 'f(x)', '{[]: 1}', '9' * 5000),
        *('0x' + 'f' * 5000, '(' * 500, '-' * 100_000 + '1', '\0'),
      )
    ),
  ],
  ids=lambda x: str(x)[:9],
)
def test_literals(text, value):
  assert config.read_literal(text) == value
