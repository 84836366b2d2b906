"""The language task: honest held-out numbers, samples and pictures."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil

import jax
import matplotlib.pyplot as plt
import matplotlib.text
import numpy as np
import optax
import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax.data import text
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ACMObjective
from mod_jax.train import evaluation
from mod_jax.train import state as state_lib
from mod_jax.train.evaluation import held_out
from mod_jax.train.step import train_step

EVERY = {'capacity': 0.25, 'period': 1, 'offset': 0}
# Scores far from 0, so that the rules differ without training.
ALL = MoDConfig(**EVERY, router_std=1.0, predictor_width=8, threshold_decay=0.5)
ROUTER = MoDConfig(**EVERY, router_std=1.0)
GAUSSIAN = MoDConfig(**EVERY, score='gaussian')

EVALUATION = {'evaluation.batches': 0, 'evaluation.batch_size': 4}
AGREEMENT = {
  'accuracy',
  'precision',
  'recall',
  'count_error',
  'routed',
  'never_route',
}
LOSSES = {'loss', 'perplexity', 'bits_per_byte'}


@pytest.fixture(scope='module', autouse=True)
def texts(tmp_path_factory):
  """Files for training, and two held-out ones of 70 and 30 bytes."""
  folder = tmp_path_factory.mktemp('texts')
  return tiny.texts(folder, a=600, b=400, held_c=70, held_d=30)


@pytest.fixture
def make(texts):
  return functools.partial(_make, texts)


@functools.cache
def _make(folder, routing):
  """Returns a task with parameters and model_state.

  Where there are thresholds, a step of training has set them.
  """
  model = LMConfig(
    num_layers=1, width=16, num_heads=2, mlp_dim=16, routing=routing
  )
  data = TextDataConfig(
    source='files',
    files=f'{folder}/[ab].txt',
    eval_files=f'{folder}/held_*.txt',
    length=16,
    max_epochs=1000,
  )
  config = tiny.experiment(model, data, **EVALUATION)
  task = make_task(config)
  optimizer = optax.sgd(0.1)
  abstract = state_lib.abstract_state(task, optimizer, tiny.one_device())
  state = state_lib.create_state(0, task, optimizer, abstract)
  if routing is None or not routing.threshold_decay:
    return task, state.params, state.model_state
  batch = next(task.modality.train_iterator())
  step = functools.partial(
    train_step, task=task, optimizer=optimizer, static_args=0.0
  )
  state, _ = jax.jit(step)(state, batch)
  return task, state.params, state.model_state


def reference(task, params, model_state, rule):
  """The held-out loss, row by row, without batches, padding or sums."""
  data = task.config.data
  tokens = b''.join(
    pathlib.Path(f.path).read_bytes() for f in text.split_files(data)[1]
  )
  model = task.config.model.build()
  apply = jax.jit(functools.partial(model.apply, mode=rule))
  nats, count = 0.0, 0
  for start in range(0, len(tokens) - 1, data.length):
    row = np.frombuffer(tokens[start : start + data.length + 1], np.uint8)
    output = apply(
      {'params': params, **model_state}, row[None, :-1].astype(int)
    )
    logits = np.asarray(output.logits_BLV[0], np.float64)
    log_prob = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nats -= log_prob[np.arange(len(row) - 1), row[1:]].sum()
    count += len(row) - 1
  assert count == len(tokens) - 1 == 99
  return nats / count


class TestEvaluate:
  RULES = ('top_k', 'threshold', 'router', 'predictor')

  @pytest.mark.slow
  def test_every_rule_has_its_numbers(self, make):
    task, params, model_state = make(ALL)
    assert task.modality.rules == self.RULES
    metrics = held_out(task, params, model_state, tiny.one_device())
    expected = {f'{r}/{m}' for r in self.RULES for m in LOSSES | AGREEMENT}
    expected |= {f'never/{m}' for m in LOSSES}  # The trivial baseline.
    missing = expected - metrics.keys()
    # A rule that decided for nothing has no precision.
    assert missing <= {f'{r}/precision' for r in self.RULES}
    assert not metrics.keys() - expected
    for rule in self.RULES:
      loss = metrics[f'{rule}/loss']
      assert 0 < loss < 10
      assert metrics[f'{rule}/perplexity'] == pytest.approx(math.exp(loss))
      # Bytes are the tokens.
      assert metrics[f'{rule}/bits_per_byte'] == pytest.approx(
        loss / math.log(2)
      )
      # 4 of 16 in a full row; the last one has 3 tokens, and 1 of them.
      assert metrics[f'{rule}/never_route'] == pytest.approx(1 - 25 / 99)
    losses = {metrics[f'{rule}/loss'] for rule in (*self.RULES, 'never')}
    assert len(losses) == 5
    for name, value in (
      ('accuracy', 1),
      ('precision', 1),
      ('recall', 1),
      ('count_error', 0),
    ):
      assert metrics[f'top_k/{name}'] == value
    assert metrics['top_k/routed'] == pytest.approx(25 / 99)
    assert metrics['router/accuracy'] < 1
    json.dumps(metrics)
    assert f'accuracy is {1 - 25 / 99:.4f}' in task.summary(metrics)

  @pytest.mark.slow
  def test_with_few_slots(self, make, tmp_path, capsys, monkeypatch):
    task, params, model_state = make(ALL)
    monkeypatch.setattr(task, 'pictures', lambda *args: {})
    trained = evaluation.Trained(
      1, task, params, model_state, tiny.one_device()
    )
    # What `eval.py` calls.
    metrics = evaluation.evaluate(trained, tmp_path, batches=0)
    drops = {f'{rule}/drop_loss' for rule in self.RULES[1:]}
    assert drops < metrics.keys()
    assert json.loads((tmp_path / 'eval.json').read_text()).items() > (
      metrics.items()
    )
    # The last row has 3 tokens, and its one slot of those, beside rows of 16.
    mode = RoutingMode(rule='router', overflow='drop')
    assert [mode.num_slots(0.25, n) for n in (16, 3)] == [5, 1]
    alone = reference(task, params, model_state, mode)
    assert metrics['router/drop_loss'] == pytest.approx(alone, rel=1e-5)
    assert metrics['router/drop_loss'] != metrics['router/loss']
    assert drops.isdisjoint(task.main_metrics(metrics))
    _, _, top_k, _, router, *_ = capsys.readouterr().out.splitlines()
    assert router.split()[-1] == f'{metrics["router/drop_loss"]:.4f}'
    assert top_k.split()[-1] == '-'

  @pytest.mark.slow
  def test_is_the_loss_of_each_row_alone(self, make):
    # Seven rows, the last of three targets, in batches of four: two of the
    # eight rows are padded, which must not count, and not route.
    task, params, model_state = make(ALL)
    metrics = held_out(task, params, model_state, tiny.one_device())
    for rule in ('top_k', 'threshold'):
      assert metrics[f'{rule}/loss'] == pytest.approx(
        reference(task, params, model_state, rule), rel=1e-5
      )

  def test_some_batches_or_all(self, make):
    task, params, model_state = make(None)
    find = functools.partial(
      held_out, task, params, model_state, tiny.one_device()
    )
    every = find()
    assert find(batches=0) == find(batches=2) == every
    assert find(batches=1) != every

  def test_dense(self, make):
    task, params, model_state = make(None)
    assert task.modality.rules == ()
    metrics = held_out(task, params, model_state, tiny.one_device())
    # Nothing chooses, so nothing speaks of a rule.
    assert metrics.keys() == LOSSES
    assert metrics['loss'] == pytest.approx(
      reference(task, params, model_state, 'top_k'), rel=1e-5
    )
    assert task.main_metrics(metrics) == {'loss': metrics['loss']}

  def test_bytes_of_subwords(self, make):
    task, params, model_state = make(None)
    task = make_task(task.config)
    token_bytes = np.arange(256) % 5 + 1

    class Tokenizer:
      vocab_size = 256

    Tokenizer.token_bytes = token_bytes
    task.modality.tokenizer = Tokenizer()
    metrics = held_out(task, params, model_state, tiny.one_device())
    _, kept = text.split_files(task.config.data)
    targets = b''.join(pathlib.Path(f.path).read_bytes() for f in kept)[1:]
    num_bytes = token_bytes[np.frombuffer(targets, np.uint8)].sum()
    assert metrics['bits_per_byte'] == pytest.approx(
      metrics['loss'] * 99 / num_bytes / math.log(2), rel=1e-5
    )


@pytest.mark.slow
def test_a_control_evaluates_and_samples(make):
  task, params, model_state = make(GAUSSIAN)
  assert task.modality.rules == ('top_k', 'fixed')
  metrics = held_out(task, params, model_state, tiny.one_device())
  again = held_out(task, params, model_state, tiny.one_device())
  assert metrics == again  # The draws are the same each time.
  assert metrics['top_k/routed'] == pytest.approx(25 / 99)
  assert 0 < metrics['fixed/routed'] < 0.6
  assert np.isfinite(metrics['fixed/loss'])
  (sample,) = task.modality.sample(
    params, model_state, ['ab'], max_new_tokens=5, key=jax.random.key(0)
  )
  assert 0 < len(sample) <= 5


def test_what_is_not_learnt_is_read_and_another_document_is_not(make):
  """A weight of 0 takes a target from the loss, and no token from the text."""
  task, params, model_state = make(None)
  (batch,) = task.modality.eval_batches(batch_size=2, num_batches=1)
  rows, length = batch['tokens'].shape
  masked = batch['weights'] * (np.arange(length) >= 5)
  parts = np.tile(1 + (np.arange(length) >= 8), (rows, 1)).astype(np.int32)
  del batch['targets']  # Without them there are logits.
  look = jax.jit(functools.partial(task.apply, mode=Mode()))
  one, other, apart = (
    look(params, model_state, batch | changes, jax.random.key(0)).logits_BLV
    for changes in ({}, {'weights': masked}, {'segments': parts})
  )
  np.testing.assert_array_equal(one, other)
  alike_L = np.abs(apart - one).max(axis=(0, 2)) < 1e-6
  np.testing.assert_array_equal(alike_L, np.arange(length) < 8)


@pytest.mark.parametrize(('capacity', 'told'), [(0.25, 0), (1.0, 1)])
def test_where_every_token_is_processed_nothing_is_foreseen(
  make, capacity, told
):
  # But for blocks that will always process every token.
  task, params, model_state = make(ALL)
  task = make_task(
    config_lib.replace(task.config, {'model.routing.capacity': capacity})
  )
  batch = next(task.modality.train_iterator())

  @functools.partial(jax.jit, static_argnames='static_args')
  def run(params, static_args):
    loss, (metric_sums, _) = task.loss(
      params, model_state, batch, jax.random.key(0), static_args
    )
    return loss, metric_sums

  loss, metric_sums = run(params, static_args=1.0)
  total, weight = map(float, metric_sums['loss'])
  assert (
    ('router/bce' in metric_sums) == ('predictor/bce' in metric_sums) == told
  )
  assert (float(loss) != pytest.approx(total / weight, rel=1e-6)) == told
  _, metric_sums = jax.eval_shape(
    functools.partial(run, static_args=0.5), params
  )
  assert {'router/bce', 'predictor/bce'} < metric_sums.keys()


class TestSample:
  @pytest.mark.slow
  def test_continues_each_prompt(self, make):
    task, params, model_state = make(ALL)
    sample = functools.partial(
      *(task.modality.sample, params, model_state),
      max_new_tokens=6,
      temperature=0.0,
    )
    prompts = ['a', 'longer prompt']
    texts = sample(prompts)
    # Alone, the same: the padding of the shorter one does not matter.
    assert [sample([p])[0] for p in prompts] == texts
    # By moving thresholds, unless another rule is asked for.
    drawn = functools.partial(
      *(sample, prompts), temperature=2.0, key=jax.random.key(0)
    )
    assert drawn() == drawn(mode=RoutingMode(rule='threshold'))
    assert drawn() != drawn(mode='router')

  def test_dense_at_the_end_of_a_run(self, make):
    task, params, model_state = make(None)
    (end,) = make_task(
      config_lib.replace(
        task.config, {'evaluation.sample_tokens': 5, 'evaluation.prompt': 'ab'}
      )
    ).finish(params, model_state)
    assert end.startswith('ab')
    assert len(end) > 2

  @pytest.mark.parametrize(
    ('row', 'words'),
    [
      ('Es war einmal ein König, und', 'Es war einmal'),
      ('  \n\n  ', '.'),
      ('Ende', 'Ende'),
      # No more than a quarter of the length.
      ('木' * 30, '木' * 16),
    ],
  )
  def test_goes_on_from_held_out_words(self, make, monkeypatch, row, words):
    dense, *_ = make(None)
    task = make_task(config_lib.replace(dense.config, {'data.length': 64}))
    tokens_BL = np.array([[*task.modality.tokenizer.encode(row), 0, 0]])
    batch = {'tokens': tokens_BL, 'valid': tokens_BL > 0}
    monkeypatch.setattr(
      task.modality, 'eval_batches', lambda **_: iter([batch])
    )
    assert task.modality._held_out_words() == words

  def test_the_end_of_a_run_without_a_causal_rule_has_no_sample(self, make):
    dense, params, _ = make(None)  # Nothing of them is looked at.
    routing = MoDConfig(**EVERY, router_loss=0.0)
    config = config_lib.replace(dense.config, {'model.routing': routing})
    assert list(make_task(config).finish(params, {})) == []


def test_pictures(make):
  task, params, model_state = make(ALL)
  figures = task.pictures(params, model_state)
  assert set(figures) == {'routing', 'router_weights'}
  # Tokens, whatever they are.
  texts = figures['routing'].findobj(matplotlib.text.Text)
  assert any('process which token' in text.get_text() for text in texts)
  for figure in figures.values():
    figure.canvas.draw()
    plt.close(figure)
  dense, params, model_state = make(None)
  assert dense.pictures(params, model_state) == {}


def test_padding_is_in_no_picture(make):
  changes = {
    'evaluation.batch_size': 8,  # Rows of 99 tokens, and one of padding.
    'model.adaptive': AdaptiveConfig(num_learners=2),
    'objective': ACMObjective(phase='end_to_end'),
  }
  task = make_task(config_lib.replace(make(ROUTER)[0].config, changes))
  variables = tiny.variables(task.config.model)
  figures = task.pictures(variables['params'], {})
  words = {
    name: ' '.join(x.get_text() for x in figure.findobj(matplotlib.text.Text))
    for name, figure in figures.items()
  }
  assert f'chosen {25 / 99:.1%}' in words['router_weights']
  assert 'Measured: 7.' in words['compute']


def test_a_run_keeps_the_tokenizer_that_it_learned(texts, tmp_path):
  def keep(task, folder):
    folder.mkdir()
    files = task.modality.files()
    for name, content in files.items():
      (folder / name).write_text(content)
    return files

  folder, run = tmp_path / 'texts', tmp_path / 'run'
  shutil.copytree(texts, folder)
  data = TextDataConfig(
    source='files',
    files=f'{folder}/[ab].txt',
    eval_files=f'{folder}/held_*.txt',
    tokenizer='bpe',
    tokenizer_vocab_size=280,
    cache_dir=f'{tmp_path}/cache',
    length=8,
    max_epochs=1000,
  )
  model = dataclasses.replace(tiny.LM, vocab_size=280)
  config = tiny.experiment(model, data)
  task = make_task(config)
  files = keep(task, run)
  sample = (texts / 'b.txt').read_text()
  ids = task.modality.tokenizer.encode(sample)
  # The text changes, and what was cached of it is gone.
  (folder / 'a.txt').write_text('another text ' * 60)
  shutil.rmtree(tmp_path / 'cache')
  kept = make_task(config, run)
  assert kept.modality.tokenizer.encode(sample) == ids
  assert make_task(config).modality.tokenizer.encode(sample) != ids
  # So it is where weights of that run are the start of another.
  other = dataclasses.replace(config, init=str(run))
  started = make_task(other, tmp_path / 'other')
  assert started.modality.tokenizer.encode(sample) == ids
  assert started.modality.files() == files
  # Weights of others have more than one file of it.
  foreign = tmp_path / 'foreign'
  foreign.mkdir()
  shutil.copy(run / 'tokenizer.json', foreign)
  (foreign / 'tokenizer_config.json').write_text('{"eos_token": "e"}')
  theirs = make_task(dataclasses.replace(config, init=str(foreign)))
  keep(theirs, tmp_path / 'third')
  again = make_task(theirs.config, tmp_path / 'third').modality.tokenizer
  assert again.fingerprint == theirs.modality.tokenizer.fingerprint
  assert again.eos_id == theirs.modality.tokenizer.eos_id
  assert again.eos_id != task.modality.tokenizer.eos_id
  # A run's data are read with its own.
  batch = next(kept.modality.train_iterator())
  assert set(batch['tokens'].ravel()) <= set(range(280))
