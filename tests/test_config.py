import dataclasses
import json
import math
from typing import Annotated, Literal

import hypothesis
from hypothesis import strategies as st
import pytest

from mod_jax import config
from mod_jax.data.images import ImageDataConfig
from mod_jax.errors import UserError
from mod_jax.models.vit import ViTConfig
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
      ('num_layers', None, 'an integer'),
      ('rate', 'fast', 'a number'),
      ('rate', False, 'a number'),
      ('rate', math.nan, 'a number'),
      ('tied', 1, 'true or false'),
      ('kv_heads', '2', 'an integer or None'),
      ('kv_heads', True, 'an integer or None'),
      ('path', 3, 'a string or None'),
      ('clip', math.nan, 'a number or None'),
      ('rate', math.inf, 'a number'),
      ('rate', 10**39, 'a number'),
      ('rate', 1e39, 'a number'),
      ('rate', 1e-320, 'a number'),
      ('clip', -math.inf, 'a number or None'),
      ('capacities', 'x', 'a number or a tuple of numbers'),
      ('mesh', [1, 2], 'a tuple of integers'),
      ('stages', 1, 'a tuple of tuples of (an integer, a number)'),
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

  @pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
      ('capacities', (0.5, 'x'), "capacities[1]='x': expected a number."),
      ('mesh', (1, True), 'mesh[1]=True: expected an integer.'),
      (
        'stages',
        ((0, 1.0, 2),),
        'stages[0]=(0, 1.0, 2): expected a tuple of (an integer, a number).',
      ),
      ('stages', ((0, 'x'),), "stages[0][1]='x': expected a number."),
    ],
  )
  def test_names_the_element(self, field, value, message):
    assert refusal(LM, **{field: value}) == f'LM.{message}'

  def test_says_why_a_number_is_none(self):
    for value in (math.nan, math.inf, 1e39, -1e-39):
      assert 'finite and not 0' in refusal(LM, rate=value)
    for value in ('fast', None):
      assert 'finite' not in refusal(LM, rate=value)

  def test_what_is_refused_is_shown_in_short(self):
    for value in ('9' * 5000, 10**4000):
      assert len(refusal(LM, rate=value)) < 350

  def test_names_the_nearest_choice(self):
    assert "Did you mean 'sigmoid'?" in refusal(Routing, gate='sigmoyd')
    assert 'Did you mean' not in refusal(Routing, gate='zzz')

  def test_accepts_what_is_declared(self):
    assert LM(rate=2, clip=3, mesh=(1, 2, 3), capacities=(1, 0.5)).rate == 2
    assert LM(rate=3.4e38, clip=-1.2e-38, capacities=0.0).rate == 3.4e38

  def test_unsupported_annotation_is_a_bug_not_bad_input(self):
    @dataclasses.dataclass(frozen=True)
    class Odd:
      table: dict = dataclasses.field(default_factory=dict)

    with pytest.raises(TypeError, match='cannot have this annotation'):
      config.validate(Odd())


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

  @pytest.mark.parametrize('value', [math.inf, -math.inf, math.nan, 1e39])
  @pytest.mark.parametrize('field', ['share', 'rate', 'weight', 'each'])
  def test_none_is_infinite(self, field, value):
    refusal(Ranges, **{field: value})

  def test_in_tuples(self):
    message = refusal(Ranges, mesh=(8, 9))
    assert message == 'Ranges.mesh[1]=9: expected an integer from -1 to 8.'
    message = refusal(Ranges, each=(0.5, -0.5))
    assert message == 'Ranges.each[1]=-0.5: expected a number in (0, 1].'

  def test_the_dotted_path_is_named(self):
    values = {'each': [0.5, 2], 'share': 0.5}
    message = refusal(config.from_dict, Ranges, values)
    assert message.startswith('each')
    assert 'in (0, 1]' in message

  def test_go_through_json(self):
    ranges = Ranges(heads=2, mesh=(1, 2), each=(0.5, 1), weight=1)
    assert config.from_json(Ranges, config.to_json(ranges)) == ranges
    assert config.to_json(Ranges(weight=1)) == config.to_json(
      Ranges(weight=1.0)
    )


class TestRoundTrip:
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
    rate=FLOATS,
    capacities=FLOATS | st.lists(FLOATS).map(tuple),
    path=st.none() | st.text(),
    stages=st.lists(st.tuples(st.integers(), FLOATS)).map(tuple),
    clip=st.none() | FLOATS,
  )
  def test_every_value_comes_back(self, **values):
    lm = LM(**values)
    assert config.from_json(LM, config.to_json(lm)) == lm

  def test_union_carries_the_class_and_others_do_not(self):
    decoded = json.loads(config.to_json(RICH))
    assert decoded['model']['type'] == 'LM'
    assert 'type' not in decoded
    assert 'type' not in decoded['model']['routing']

  def test_union_without_a_class_is_its_first(self):
    saved_before_the_union = {'steps': 1, 'model': {'width': 8}}
    back = config.from_dict(Experiment, saved_before_the_union)
    assert back.model == LM(width=8)

  def test_absent_fields_take_their_default(self):
    assert config.from_dict(LM, {'width': 8}) == LM(width=8)


@pytest.mark.parametrize(
  ('path', 'meant'),
  [
    ('lr', "'optimizer.learning_rate'"),
    ('optimizer.lr', "'optimizer.learning_rate'"),
    ('optimizer.label_smoothing', "'data.augment.label_smoothing'"),
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


class TestFromDict:
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
    values = json.loads(config.to_json(RICH))
    for path, value in change.items():
      *groups, name = path.split('.')
      holder = values
      for group in groups:
        holder = holder[group]
      holder[name] = value
    assert refusal(config.from_dict, Experiment, values) == message

  def test_refuses_a_missing_field_without_default(self):
    message = refusal(config.from_dict, Experiment, {})
    assert message == 'steps is missing: expected an integer.'

  def test_refuses_what_is_no_group_of_fields(self):
    message = refusal(config.from_dict, Experiment, None)
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
  with pytest.raises(TypeError, match='has no field `type`'):
    config.to_json(Holder())


class TestOverride:
  """What `--config.path=text` does."""

  @pytest.mark.parametrize(
    ('path', 'text', 'value'),
    [
      ('num_layers', '3', 3),
      ('rate', '.5', 0.5),
      ('rate', '2', 2.0),
      ('tied', 'False', False),
      ('kv_heads', 'none', None),
      ('path', '123', '123'),
      ('path', 'None', None),
      ('capacities', '1,.2', (1.0, 0.2)),
      ('capacities', '.25', 0.25),
      ('mesh', '4', (4,)),
      ('mesh', '()', ()),
      ('stages', '((0,1),(5,.5))', ((0, 1.0), (5, 0.5))),
      ('pair', "'b',2", ('b', 2)),
      ('dtype', 'bfloat16', 'bfloat16'),
      ('order', '2', 2),
      ('routing', 'None', None),
      ('routing', "{'gate': 'sigmoid'}", Routing(gate='sigmoid')),
    ],
  )
  def test_values(self, path, text, value):
    changed = config.override(LM(routing=Routing()), [(path, text)])
    assert changed == dataclasses.replace(
      LM(routing=Routing()), **{path: value}
    )
    assert type(getattr(changed, path)) is type(value)

  def test_fields_are_set_at_once(self):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Heads:
      width: int = 4
      heads: int = 2

      def __post_init__(self):
        if self.width % self.heads:
          raise UserError('width does not divide.')

    changed = config.override(Heads(), [('width', '9'), ('heads', '3')])
    assert changed == Heads(width=9, heads=3)

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

  def test_a_group_in_a_group(self):
    texts = [
      ('model.routing.capacity', '0.5'),
      ('model.routing', "{'gate': 'sigmoid'}"),
      ('model', "{'type': 'LM', 'width': 8}"),
    ]
    changed = config.override(EXAMPLES[2], texts)
    routing = Routing(capacity=0.5, gate='sigmoid')
    assert changed.model == LM(width=8, routing=routing)

  def test_a_group_and_then_its_fields(self):
    texts = [('model', "{'type': 'ViT'}"), ('model.patch', '8')]
    for order in (texts, texts[::-1]):
      changed = config.override(EXAMPLES[2], order)
      assert changed.model == ViT(patch=8)
    # Unlike in JSON, where it may be of before there was a choice.
    for text in ('{}', "{'width': 8}"):
      assert refusal(config.override, RICH, [('model', text)]) == (
        '--config.model.type is missing: say which group of fields is meant,'
        " one of 'LM', 'ViT'."
      )

  @pytest.mark.parametrize(
    ('path', 'text', 'message'),
    [
      ('model.width', 'x', '--config.model.width=x: expected an integer.'),
      ('model.mesh', '1,x', 'mesh=1,x: expected a tuple of integers.'),
      ('model.rate', 'fast', '--config.model.rate=fast: expected a number.'),
      ('model.tied', 'maybe', 'tied=maybe: expected true or false.'),
      ('model.kv_heads', '1.5', 'kv_heads=1.5: expected an integer or None.'),
      ('model.width.x', '1', 'config.model.width is 64 and has no'),
      ('model.zzz', '1', "config.model has no field 'zzz'. Its fields are"),
      ('model', '{}x', '--config.model={}x: expected LM or ViT.'),
      ('model', "{'type': []}", 'config.model.type=(): expected one of'),
      ('model.routing.capacity', '2', 'model.routing: capacity=2.0: expected'),
      ('model.width', '-' * 9000, '...: expected an integer.'),
    ],
  )
  def test_refusals(self, path, text, message):
    assert message in refusal(config.override, RICH, [(path, text)])


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


def test_a_group_that_is_none_has_no_fields():
  changes = {'model.routing.capacity': 0.5}
  message = refusal(config.replace, Experiment(steps=1), changes)
  assert message == (
    "model.routing.capacity: model.routing is None and has no 'capacity'."
  )


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
