"""`Run.chat`, and the settings of `Run.predict`."""

import dataclasses
import json
import pathlib
import shutil

import pytest

import mod_jax
from mod_jax.errors import UserError
from mod_jax.serving.engine import Engine

MODEL = pathlib.Path(__file__).parents[1] / 'golden' / 'lm_eval' / 'model'
TEMPLATE = """{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}
{%- if messages[0].role != 'user' %}{{ raise_exception('users begin') }}
{%- endif %}{% if add_generation_prompt %}answer {% endif %}"""
MESSAGES = [{'role': 'user', 'content': 'how many trees'}]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chat') / 'model'
  shutil.copytree(MODEL, folder)
  (folder / 'chat_template.jinja').write_text(TEMPLATE)
  return mod_jax.load(folder)


def test_a_chat_continues_the_rendered_messages(run):
  tokens = run.tokenizer.encode_chat('user how many trees answer ')
  answer = run.chat(MESSAGES, max_new_tokens=8)
  generated = run.task.modality.continued(
    run.variables['params'], {}, [tokens], max_new_tokens=8, temperature=0.0
  )
  (expected,) = run.task.modality.decoded([tokens], generated)
  assert answer == expected


def test_streams_are_independent_and_equal_the_whole(run):
  kwargs = {'max_new_tokens': 8, 'temperature': 1.0}
  whole = [run.chat(MESSAGES, seed=seed, **kwargs) for seed in (1, 2)]
  assert whole[0] != whole[1]
  streams = [
    run.chat(MESSAGES, stream=True, seed=seed, **kwargs) for seed in (1, 2)
  ]
  first = next(streams[0])
  assert ''.join(streams[1]) == whole[1]
  assert first + ''.join(streams[0]) == whole[0]


def test_published_models_are_short_by_default(tmp_path):
  """Some take texts for which few machines have room."""
  folder = tmp_path / 'model'
  shutil.copytree(MODEL, folder)
  fields = json.loads((folder / 'config.json').read_text())
  fields['max_position_embeddings'] = 10**6
  (folder / 'config.json').write_text(json.dumps(fields))
  long = mod_jax.load(folder)
  assert (long.max_length, long.default_length) == (10**6, 2048)
  assert Engine(long, slots=1).max_length == 2048
  asked = []
  language = long.task.modality

  def continued(*args, max_new_tokens, **kwargs):
    asked.append(max_new_tokens)
    raise StopIteration

  language.continued = continued
  with pytest.raises(StopIteration):
    long.predict('how many trees')
  assert asked == [2048 - len(long.encode('how many trees'))]
  # What was trained here is as long as it was trained.
  ours = dataclasses.replace(long, foreign=False)
  assert ours.default_length == 10**6


def test_refusals(run):
  with pytest.raises(UserError, match='users begin'):
    run.chat([{'role': 'system', 'content': 'x'}])
  with pytest.raises(UserError, match='no chat template'):
    mod_jax.load(MODEL).chat(MESSAGES)
  with pytest.raises(UserError, match='top: this model takes max_new_t.*leave'):
    run.predict('how', top=3)


def test_an_answer_that_is_not_whole_is_an_error(run, monkeypatch):
  def fail(*_):
    raise UserError('no text')

  monkeypatch.setattr(type(run.tokenizer), 'decode_after', fail)
  with pytest.raises(UserError, match='cannot turn its tokens to text'):
    run.chat(MESSAGES, max_new_tokens=8)
