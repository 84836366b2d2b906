"""Metrics: sums are exact, and the files read as if never interrupted."""

import importlib.util
import json
import math
import os
import resource
import struct
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from mod_jax.errors import UserError
from mod_jax.losses import sums
from mod_jax.runs import metrics
from mod_jax.runs.metrics import MetricWriter


def test_what_only_one_side_measured_and_what_nobody_did():
  a = {'x': (1.0, 2.0)}
  both = sums.add(a, {'y': (3.0, 4.0), 'x': (1.0, 2.0), 'z': (0.0, 0.0)})
  assert both == {'x': (2.0, 4.0), 'y': (3.0, 4.0), 'z': (0.0, 0.0)}
  assert a == {'x': (1.0, 2.0)}
  assert metrics.finalize(both) == {'x': 0.5, 'y': 0.75}


def test_a_batch_counts_beside_a_great_many():
  parts = [{'x': (jnp.float32(n), jnp.float32(n))} for n in (2**24, 1)]
  added = sums.add(*map(metrics.on_host, parts))
  assert [*map(float, added['x'])] == [2**24 + 1, 2**24 + 1]


def test_values_read_back_bit_for_bit(tmp_path):
  values = {
    'third': jnp.float32(1) / 3,
    'tiny': np.float64(5e-324),
    'pi': np.pi,
    'nan': jnp.float32(jnp.nan),
    'inf': -np.inf,
    'bf16': jnp.bfloat16(0.1),
    'count': np.int64(2**60 + 1),
  }
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(3, 'train', values)
  (record,) = metrics.read(tmp_path)
  assert (record['step'], record['kind']) == (3, 'train')
  for name in ('third', 'tiny', 'pi', 'bf16'):
    expected = float(np.asarray(values[name]).astype(np.float64))
    assert struct.pack('d', record[name]) == struct.pack('d', expected)
  assert record['count'] == 2**60 + 1
  # JSON has no word for these, whatever Python's module writes.
  assert np.isnan(record['nan'])
  assert np.isnan(record['inf'])
  text = (tmp_path / 'metrics.jsonl').read_text()
  assert json.loads(text, parse_constant=pytest.fail)['inf'] is None


def test_files_of_old_with_bare_nan_are_read(tmp_path):
  line = '{"step": 1, "kind": "train", "loss": NaN, "x": -Infinity}\n'
  (tmp_path / 'metrics.jsonl').write_text(line)
  (record,) = metrics.read(tmp_path)
  assert np.isnan(record['loss'])
  assert record['x'] == -np.inf


def test_json_is_strict_at_any_depth():
  value = {'a': [1.5, {'b': np.float64('nan')}], 'c': (math.inf, 2, None)}
  expected = '{"a": [1.5, {"b": null}], "c": [null, 2, null]}'
  assert metrics.to_json(value) == expected


def run(workdir, steps, resume_step=None):
  with MetricWriter(
    workdir, tensorboard=False, resume_step=resume_step
  ) as writer:
    for step in steps:
      writer.write(step, 'train', {'loss': 1 / step})
      if step % 2 == 0:
        writer.write(step, 'eval', {'loss': 2 / step})


@pytest.mark.parametrize('torn', [b'', b'{"step": 7, "ki', b'{"step": 7}'])
def test_resumed_file_reads_like_an_uninterrupted_one(tmp_path, torn):
  run(tmp_path / 'whole', range(1, 10))
  run(tmp_path / 'cut', range(1, 7))
  path = tmp_path / 'cut' / 'metrics.jsonl'
  path.write_bytes(path.read_bytes() + torn)
  assert len(metrics.read(tmp_path / 'cut')) == 9
  run(tmp_path / 'cut', range(5, 10), resume_step=4)
  assert (
    path.read_bytes() == (tmp_path / 'whole' / 'metrics.jsonl').read_bytes()
  )
  assert [p.name for p in path.parent.iterdir()] == ['metrics.jsonl']


def test_a_fresh_run_starts_an_empty_file(tmp_path):
  run(tmp_path, range(1, 5))
  run(tmp_path, [1])
  assert metrics.read(tmp_path) == [{'step': 1, 'kind': 'train', 'loss': 1.0}]


def test_killed_while_rewinding_loses_nothing(tmp_path, monkeypatch):
  run(tmp_path, range(1, 9))
  before = metrics.read(tmp_path)

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, [5], resume_step=4)
  assert metrics.read(tmp_path) == before


@pytest.mark.parametrize('line', ['oops', '[1]', '{"loss": 1}', '3'])
def test_foreign_line_is_named(tmp_path, line):
  run(tmp_path, [1])
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write(line + '\n')
  with pytest.raises(UserError, match='line 2 of .*metrics.jsonl'):
    metrics.read(tmp_path)
  with pytest.raises(UserError, match='line 2 of .*metrics.jsonl'):
    run(tmp_path, [2], resume_step=1)


def events(workdir):
  """Returns all TensorBoard events, file by file."""
  result = []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:  # Length, its checksum, the event, its checksum.
      (length,) = struct.unpack('<Q', data[:8])
      result.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return result


def scalars(workdir):
  return [
    (event.step, value.tag, value.simple_value)
    for event in events(workdir)
    for value in event.summary.value
    if value.HasField('simple_value')
  ]


def test_tensorboard_events_of_a_run_that_went_on(tmp_path):
  with MetricWriter(tmp_path, config_json='{"width": 8}') as writer:
    writer.write(1, 'train', {'loss': 2.5, 'grad_norm': jnp.float32(0.5)})
    writer.write(5, 'eval', {'loss': 2.25})
  texts = [v for e in events(tmp_path) for v in e.summary.value if v.tag]
  assert any(b'"width": 8' in b''.join(v.tensor.string_val) for v in texts)
  with MetricWriter(tmp_path, resume_step=4) as writer:
    writer.write(5, 'eval', {'loss': 2.5})
  # Nothing is overwritten; TensorBoard hides what a START purges.
  assert scalars(tmp_path) == [
    (1, 'train/loss', 2.5),
    (1, 'train/grad_norm', 0.5),
    (5, 'eval/loss', 2.25),
    (5, 'eval/loss', 2.5),
  ]
  starts = [e.step for e in events(tmp_path) if e.HasField('session_log')]
  assert starts == [0, 5]
  assert 'tensorflow' not in sys.modules


def test_tensorboard_ends_where_its_file_cannot_grow(tmp_path, caplog):
  def write():
    with MetricWriter(tmp_path, config_json='x' * 2**21) as writer:
      for step in range(50):
        writer.write(step, 'train', {'loss': 1.0})

  # As a full disk does it, without one: no file may have more than 1 MiB.
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
  try:
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(30)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not thread.is_alive()
  assert caplog.text.count('TensorBoard lacks the rest') == 1
  assert len(metrics.read(tmp_path)) == 50


def test_wandb_gets_the_same_and_continues_its_run(tmp_path, monkeypatch):
  opened, logged = [], []

  class Run:
    def log(self, values, step):
      logged.append((step, values))

    def finish(self):
      logged.append('finished')

  def init(**kwargs):
    opened.append(kwargs)
    return Run()

  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match='pip install wandb'):
    MetricWriter(tmp_path / 'my_run', wandb=True)
  assert not (tmp_path / 'my_run').exists()
  module = types.ModuleType('wandb')
  module.init = init
  monkeypatch.setitem(sys.modules, 'wandb', module)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: module)
  for resume_step in (None, 1, None):
    with MetricWriter(
      tmp_path / 'my_run',
      tensorboard=False,
      wandb=True,
      resume_step=resume_step,
      config_json=json.dumps({'width': 8}),
    ) as writer:
      writer.write(2, 'train', {'loss': 0.5})
  assert logged == [(2, {'train/loss': 0.5}), 'finished'] * 3
  assert opened[0]['config'] == {'width': 8}
  assert opened[0]['name'] == 'my_run'
  first, resumed, afresh = (kwargs['id'] for kwargs in opened)
  assert first == resumed
  assert first != afresh


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  with MetricWriter(tmp_path / 'run') as writer:
    writer.write(1, 'train', {'loss': 1.0})
  assert not (tmp_path / 'run').exists()
