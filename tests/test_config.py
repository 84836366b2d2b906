import dataclasses
import json
import math
from typing import Literal

import hypothesis
from hypothesis import strategies as st
import ml_collections
import pytest

from mod_jax import config
from mod_jax.errors import UserError


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
      ('num_layers', None, 'an integer'),
      ('rate', 'fast', 'a number'),
      ('rate', False, 'a number'),
      ('rate', math.nan, 'a number'),
      ('tied', 1, 'true or false'),
      ('kv_heads', '2', 'an integer or None'),
      ('kv_heads', True, 'an integer or None'),
      ('path', 3, 'a string or None'),
      ('clip', math.nan, 'a number or None'),
      ('capacities', (0.5, 'x'), 'a number or a tuple of numbers'),
      ('mesh', [1, 2], 'a tuple of integers'),
      ('mesh', (1, True), 'a tuple of integers'),
      ('stages', ((0, 1.0, 2),), 'a tuple of tuples of (an integer, a number)'),
      ('pair', ('a', 1, 1), 'a tuple of (a string, an integer)'),
      ('dtype', 'fp8', "one of 'float32', 'bfloat16' or None"),
      ('order', True, 'one of 1, 2'),
      ('order', 1.0, 'one of 1, 2'),
      ('routing', 0.5, 'Routing or None'),
      ('routing', ViT(), 'Routing or None'),
    ],
  )
  def test_refuses(self, field, value, expected):
    message = refusal(LM, **{field: value})
    assert message.startswith(f'LM.{field}=')
    assert f': expected {expected}.' in message
    if not isinstance(value, ViT):
      assert repr(value) in message

  def test_names_the_nearest_choice(self):
    assert "Did you mean 'sigmoid'?" in refusal(Routing, gate='sigmoyd')
    assert 'Did you mean' not in refusal(Routing, gate='zzz')

  def test_accepts_what_is_declared(self):
    assert LM(rate=2, clip=3, mesh=(1, 2, 3), capacities=(1, 0.5)).rate == 2
    assert LM(rate=math.inf).rate == math.inf

  def test_unsupported_annotation_is_a_bug_not_bad_input(self):
    @dataclasses.dataclass(frozen=True)
    class Odd:
      table: dict = dataclasses.field(default_factory=dict)

    with pytest.raises(TypeError, match='cannot have this annotation'):
      config.validate(Odd())


class TestRoundTrip:
  @pytest.mark.parametrize('experiment', EXAMPLES)
  def test_config_dict(self, experiment):
    as_dict = config.to_config_dict(experiment)
    assert isinstance(as_dict, ml_collections.ConfigDict)
    assert config.from_config_dict(Experiment, as_dict) == experiment
    # As config_flags hands it over, and as a plain dictionary.
    as_dict.lock()
    assert config.from_config_dict(Experiment, as_dict) == experiment
    assert config.from_config_dict(Experiment, as_dict.to_dict()) == experiment

  @pytest.mark.parametrize('experiment', EXAMPLES)
  def test_json(self, experiment):
    text = config.to_json(experiment)
    back = config.from_json(Experiment, text)
    assert back == experiment
    assert hash(back) == hash(experiment)
    assert config.to_json(back) == text

  def test_json_is_in_the_order_of_the_fields(self):
    decoded = json.loads(config.to_json(RICH))
    fields = [field.name for field in dataclasses.fields(LM)]
    assert list(decoded['model']) == ['type', *fields]
    assert list(decoded) == ['steps', 'model']

  def test_equal_configs_give_equal_json(self):
    assert config.to_json(LM(rate=1)) == config.to_json(LM(rate=1.0))

  @hypothesis.given(
    rate=st.floats(allow_nan=False),
    capacities=st.floats(0, 1) | st.lists(st.floats(0, 1)).map(tuple),
    path=st.none() | st.text(),
    stages=st.lists(st.tuples(st.integers(), st.floats(0, 1))).map(tuple),
    clip=st.none() | st.floats(allow_nan=False),
  )
  def test_every_value_comes_back(self, **values):
    lm = LM(**values)
    assert config.from_json(LM, config.to_json(lm)) == lm
    as_dict = config.to_config_dict(lm)
    assert config.from_config_dict(LM, as_dict) == lm

  def test_union_carries_the_class_and_others_do_not(self):
    as_dict = config.to_config_dict(RICH)
    assert as_dict.model.type == 'LM'
    assert 'type' not in as_dict
    assert 'type' not in as_dict.model.routing

  def test_union_without_a_class_is_its_first(self):
    saved_before_the_union = {'steps': 1, 'model': {'width': 8}}
    back = config.from_config_dict(Experiment, saved_before_the_union)
    assert back.model == LM(width=8)

  def test_absent_fields_take_their_default(self):
    assert config.from_config_dict(LM, {'width': 8}) == LM(width=8)

  def test_fields_can_be_set_in_a_config_file(self):
    as_dict = config.to_config_dict(Experiment(steps=1)).lock()
    as_dict.model.kv_heads = 3
    as_dict.model.rate = 0.5
    as_dict.model.clip = 2
    as_dict.model.routing = config.to_config_dict(Routing(gate='sigmoid'))
    as_dict.model.routing.capacity = 1
    assert config.from_config_dict(Experiment, as_dict).model == LM(
      kv_heads=3, rate=0.5, clip=2, routing=Routing(capacity=1, gate='sigmoid')
    )


class TestFromConfigDict:
  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      (
        {'model.num_layer': 3},
        "model.num_layer: LM has no field 'num_layer'. Did you mean "
        "'num_layers'?",
      ),
      (
        {'zzz': 3},
        "zzz: Experiment has no field 'zzz'. Its fields are steps, model.",
      ),
      (
        {'model.routing.gate': 'row'},
        "model.routing.gate='row': expected one of 'raw', 'sigmoid', "
        "'one_plus_tanh'. Did you mean 'raw'?",
      ),
      (
        {'model.routing.capacity': 2},
        'model.routing: capacity=2.0: expected a number in (0, 1].',
      ),
      ({'model.width': 'abc'}, "model.width='abc': expected an integer."),
      ({'model.width': True}, 'model.width=True: expected an integer.'),
      ({'model.mesh': [1, 'x']}, "model.mesh[1]='x': expected an integer."),
      (
        {'model.stages': [[1]]},
        'model.stages[0]=(1,): expected a tuple of (an integer, a number).',
      ),
      (
        {'model.capacities': 'all'},
        "model.capacities='all': expected a number or a tuple of numbers.",
      ),
      ({'model': 3}, 'model=3: expected LM or ViT.'),
      ({'model.routing': 3}, 'model.routing=3: expected Routing or None.'),
      (
        {'model.type': 'Vit'},
        "model.type='Vit': expected one of 'LM', 'ViT'. Did you mean 'ViT'?",
      ),
      ({'steps': None}, 'steps=None: expected an integer.'),
    ],
  )
  def test_refusal_names_the_dotted_path(self, change, message):
    values = config.to_config_dict(RICH).to_dict()
    for path, value in change.items():
      *groups, name = path.split('.')
      holder = values
      for group in groups:
        holder = holder[group]
      holder[name] = value
    assert refusal(config.from_config_dict, Experiment, values) == message

  def test_refuses_a_missing_field_without_default(self):
    message = refusal(config.from_config_dict, Experiment, {})
    assert message == 'steps is missing: expected an integer.'

  def test_refuses_what_is_no_group_of_fields(self):
    message = refusal(config.from_config_dict, Experiment, None)
    assert 'the config is a NoneType' in message

  @pytest.mark.parametrize('text', ['', '{', '[]', '3'])
  def test_from_json_refuses_what_is_no_object(self, text):
    assert refusal(config.from_json, Experiment, text)


def test_a_member_of_a_union_may_not_have_a_field_type():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Typed:
    type: int = 1

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Holder:
    model: Typed | ViT = Typed()

  # The hints of local classes cannot be found by name: they are objects here.
  for convert in (config.to_json, config.to_config_dict):
    with pytest.raises(TypeError, match='cannot have a field of this name'):
      convert(Holder())


class TestDiff:
  def test_one_line_per_field(self):
    other = dataclasses.replace(
      RICH,
      steps=8,
      model=dataclasses.replace(
        RICH.model,
        width=256,
        routing=dataclasses.replace(RICH.model.routing, gate='raw'),
      ),
    )
    assert config.diff(RICH, other) == [
      'steps: 7 -> 8',
      'model.width: 64 -> 256',
      "model.routing.gate: 'sigmoid' -> 'raw'",
    ]

  def test_none_for_equal(self):
    assert config.diff(RICH, RICH) == []
    assert config.diff(LM(rate=1), LM(rate=1.0)) == []

  def test_group_that_is_none_on_one_side(self):
    assert config.diff(LM(), LM(routing=Routing())) == [
      "routing: None -> Routing(capacity=0.125, gate='raw')"
    ]

  def test_other_class(self):
    assert config.diff(LM(), ViT()) == ['type: LM -> ViT']
    (line,) = config.diff(Experiment(steps=1), EXAMPLES[2])
    assert line.startswith('model: LM(')
    assert line.endswith('-> ViT(patch=8)')


def test_nearest():
  assert config.nearest('wdith', ['depth', 'width']) == " Did you mean 'width'?"
  assert config.nearest('VIT', ['lm', 'ViT']) == " Did you mean 'ViT'?"
  assert config.nearest('zzz', ['depth', 'width']) == ''


def test_choose():
  table = {'': 1, 'tiny': 2}
  assert config.choose('tiny', table) == 2
  message = refusal(config.choose, 'tinny', table)
  assert message == (
    "unknown variant 'tinny': expected one of '', 'tiny'. Did you mean 'tiny'?"
  )
