"""lm-evaluation-harness over our models, against its Hugging Face backend."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.data import text
from mod_jax.errors import UserError
from mod_jax.serving.engine import Engine

# `make test-slow` installs it.
pytest.importorskip('lm_eval')

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.fixture(scope='module')
def harness():
  """Returns the harness and our adapter, without a network."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE'):
      patch.setenv(name, '1')
    import lm_eval

    from mod_jax import lm_eval as adapter

    yield lm_eval, adapter


@pytest.fixture(scope='module')
def tasks():
  path = GOLDEN.parents[1] / 'tools' / 'golden' / 'lm_eval_tasks.py'
  spec = importlib.util.spec_from_file_location('lm_eval_tasks', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope='module')
def dense():
  return mod_jax.load(GOLDEN / 'lm_eval' / 'model')


def evaluate(harness, tasks, run, tmp_path, **kwargs):
  lm_eval, adapter = harness
  model = adapter.ModJax(run, batch_size=2, **kwargs)
  results = lm_eval.simple_evaluate(
    model=model, tasks=tasks.tasks(tmp_path / 'documents.jsonl')
  )
  return tasks.answers(results)


def same(found, expected):
  for task, answers in expected.items():
    for a, b in zip(found[task], answers, strict=True):
      if task == 'until':
        assert a == b
        continue
      for x, y in zip(np.ravel(a), np.ravel(b), strict=True):
        assert x == pytest.approx(y, abs=1e-3)


def test_answers_are_those_of_the_hugging_face_backend(
  harness, tasks, dense, tmp_path
):
  expected = json.loads((GOLDEN / 'lm_eval' / 'expected.json').read_text())
  found = json.loads(json.dumps(evaluate(harness, tasks, dense, tmp_path)))
  same(found, expected)


def test_a_routed_model_is_scored_under_a_causal_rule(harness, dense):
  _, adapter = harness
  routed = mod_jax.route(dense, 'mod', capacity=0.5, gate='raw')
  model = adapter.ModJax(routed, batch_size=2)
  # What comes after a text does not change what it is worth.
  context = dense.encode('Snow fell all night.')
  more = dense.tokenizer.encode(' In the morning')
  (short, long) = model._loglikelihood_tokens(
    [
      (None, context[:3], context[3:]),
      (None, context[:3], context[3:] + more),
    ]
  )
  (rest,) = model._loglikelihood_tokens([(None, context, more)])
  assert long[0] == pytest.approx(short[0] + rest[0], abs=1e-3)
  with pytest.raises(UserError, match="rule='predictor' cannot generate"):
    adapter.ModJax(routed, rule='predictor')


def test_a_model_that_sees_is_scored_on_texts(harness):
  _, adapter = harness
  scenes = config_lib.load(GOLDEN.parents[1] / 'configs/vlm/scenes.py')
  run = tiny.run(scenes.get_config('pmod_tiny'))
  ((found, _),) = adapter.ModJax(run, batch_size=2)._loglikelihood_tokens(
    [(None, [97, 98], [99])]
  )
  language = {'params': run.variables['params']['language']}
  output = tiny.apply(run.config.language, language, np.array([[97, 98]]))
  expected = jax.nn.log_softmax(output.logits_BLV[0, -1])[99]
  assert found == pytest.approx(float(expected), abs=1e-3)


def test_a_long_continuation_leaves_room_for_what_it_continues(
  harness, dense, monkeypatch
):
  _, adapter = harness
  model = adapter.ModJax(dense, batch_size=2, max_length=32)
  submit, asked = Engine.submit, []

  def recorded(self, tokens, **settings):
    asked.append((tokens, settings['max_new_tokens']))
    return submit(self, tokens, **settings)

  monkeypatch.setattr(Engine, 'submit', recorded)
  texts = ('Snow fell. ' * 20, 'Snow', '')
  settings = {'until': [], 'max_gen_toks': 256, 'top_k': None, 'top_p': None}
  model.generate_until(
    [types.SimpleNamespace(args=(text, settings)) for text in texts]
  )
  (long, new), (short, rest), (empty, _) = asked
  assert long == dense.encode(texts[0])[-16:]
  assert new == 16
  assert short == dense.encode('Snow')
  assert rest == 32 - len(short)
  assert empty


def test_samples_of_a_repeated_request_differ(harness, dense):
  _, adapter = harness
  settings = {'do_sample': True, 'temperature': 1.0, 'max_gen_toks': 8}
  request = types.SimpleNamespace(args=('Snow', settings))
  model = adapter.ModJax(dense, batch_size=2)
  assert len({*model.generate_until([request] * 4)}) == 4


def test_texts_are_not_cut_without_a_word(harness, dense, monkeypatch):
  _, adapter = harness
  model, told = adapter.ModJax(dense, batch_size=2, max_length=8), []
  monkeypatch.setattr(
    adapter.logging, 'log_first_n', lambda *args: told.append(args[2:])
  )
  tokens = dense.encode('Snow fell all night.')[:1] * 10
  model._loglikelihood_tokens([(None, tokens[:5], tokens[:4])])
  assert not told  # The last token is only a target.
  model._loglikelihood_tokens([(None, tokens[:5], tokens[:5])])
  assert told == [(1, 9, 8)]


def test_texts_in_windows_are_scored_as_one_by_one(harness, dense):
  _, adapter = harness
  model = adapter.ModJax(dense, batch_size=2, max_length=8)
  requests = [
    types.SimpleNamespace(args=('Snow fell all night. ' * n,))
    for n in (1, 4, 2)
  ]
  together = model.loglikelihood_rolling(requests)
  apart = [model.loglikelihood_rolling([request])[0] for request in requests]
  assert together == pytest.approx(apart, abs=1e-3)


def test_tasks_are_made_from_held_out_texts(harness, dense, tmp_path):
  lm_eval, adapter = harness
  ends = {}
  for i in range(150):
    ends[f't{i}'] = f'Then snow fell on road {i}.'
    lines = f'The cat sat on the mat. {ends[f"t{i}"]}\n\n* A list. Of two.\n'
    (tmp_path / f't{i}.txt').write_text(lines)
  texts, out = f'{tmp_path}/*.txt', tmp_path / 'tasks'
  script = GOLDEN.parents[1] / 'benchmarks' / 'text_tasks.py'
  command = [sys.executable, script, f'--texts={texts}', f'--out={out}']
  subprocess.run(command, check=True)
  lines = map(json.loads, (out / 'documents.jsonl').read_text().splitlines())
  _, files = text.split_files(text.TextDataConfig(source='files', files=texts))
  held_out = sorted(ends[pathlib.Path(file.name).stem] for file in files)
  documents = sorted(lines, key=lambda x: x['choices'][x['label']])
  assert [x['choices'][x['label']] for x in documents] == held_out
  for x in documents:
    assert x['context'] == 'The cat sat on the mat.'
    assert len({*x['choices']} & {*held_out}) == 4
    assert f'{x["before"]} {x["word"]}.'.startswith(x['context'])
  results = lm_eval.simple_evaluate(
    model=adapter.ModJax(dense, batch_size=2),
    tasks=['next_sentence', 'last_word'],
    task_manager=lm_eval.tasks.TaskManager(include_path=str(out)),
  )
  assert 0 <= results['results']['next_sentence']['acc,none'] <= 1
  assert results['results']['last_word']['perplexity,none'] > 1
