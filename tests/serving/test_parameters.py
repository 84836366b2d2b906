"""Every parameter of the server, by the client that everybody has."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import command_line
import jsonschema
import numpy as np
import openai
from prometheus_client.parser import text_string_to_metric_families
import pytest
from tiny_server import END, client_of, export, serving

import mod_jax
from mod_jax.errors import UserError
from mod_jax.pretrained.load import Run
from mod_jax.scripts import serve
from mod_jax.serving import engine as engine_lib
from mod_jax.serving import grammar
from mod_jax.serving import server as server_lib
from mod_jax.serving.engine import Engine

pytestmark = pytest.mark.slow

LENGTH = 400
TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
CHAT = {'model': 'tiny', 'messages': [{'role': 'user', 'content': 'how'}]}
TEXT = {'model': 'tiny', 'prompt': 'how', 'max_tokens': 8, 'seed': 3}


def fields(**properties):
  """Returns the schema of an object that has these fields and no others."""
  told = {'type': 'object', 'properties': properties}
  return told | {'required': [*properties], 'additionalProperties': False}


SCHEMAS = {
  'flat': fields(
    colour={'enum': ['red', 'green', None]}, sure={'type': 'boolean'}
  ),
  'numbers': {
    'type': 'array',
    'items': {'type': 'integer', 'minimum': -5, 'maximum': 99},
    'minItems': 2,
    'maxItems': 5,
  },
  'nested': {
    **fields(
      name={'type': 'string', 'maxLength': 6},
      at=fields(x={'$ref': '#/$defs/share'}),
    ),
    '$defs': {'share': {'type': 'integer', 'minimum': 0, 'maximum': 9}},
  },
  'either': {
    'anyOf': [
      {'type': 'string', 'pattern': '^[a-f]{2,4}$'},
      {'type': 'string', 'format': 'uuid'},
      {'const': [1, 'é😀']},
    ]
  },
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return export(tmp_path_factory.mktemp('model'), LENGTH, TEMPLATE)


@pytest.fixture(scope='module')
def run(folder):
  return mod_jax.load(folder)


@pytest.fixture(scope='module')
def client(run):
  with serving(Engine(run, slots=4), run, queue=6) as client:
    yield client


@pytest.fixture(scope='module')
def alone(run):
  """An engine that no server has."""
  return Engine(run, slots=4)


def test_choices(client, alone):
  found = client.completions.create(
    **TEXT | {'prompt': ['how', 'are you'], 'n': 3}
  )
  expected = [
    alone.generate([prompt], max_new_tokens=8, temperature=1.0, seed=seed)[0]
    for prompt in ('how', 'are you')
    for seed in (3, 4, 5)
  ]
  assert [choice.text for choice in found.choices] == [c.text for c in expected]
  assert [choice.index for choice in found.choices] == list(range(6))
  assert len({choice.text for choice in found.choices}) > 3
  # Without a seed each has its own, also where prompts are equal. Texts may be
  # equal by chance, as bytes that are no characters look alike.
  unseeded = TEXT | {'prompt': ['how'] * 4, 'seed': None, 'logprobs': 0}
  choices = client.completions.create(**unseeded).choices
  assert len({tuple(x.logprobs.token_logprobs) for x in choices}) == 4
  # Prompts count once.
  assert found.usage.prompt_tokens == len('how') + len('are you')
  assert found.usage.completion_tokens == sum(len(c.tokens) for c in expected)
  chat = client.chat.completions.create(**CHAT, n=2, max_tokens=5, seed=1)
  assert len({choice.message.content for choice in chat.choices}) == 2
  pieces = ['', '']
  for chunk in client.chat.completions.create(
    **CHAT, n=2, max_tokens=5, seed=1, stream=True
  ):
    (choice,) = chunk.choices
    pieces[choice.index] += choice.delta.content
  assert pieces == [choice.message.content for choice in chat.choices]


def test_the_pieces_of_a_chat_join_to_the_whole(client):
  """OpenAI's client joins all texts of the pieces, also the role."""
  asked = CHAT | {'max_tokens': 8, 'seed': 1}
  whole = client.chat.completions.create(**asked).choices[0].message.content
  # It refuses to join what the limit has ended.
  with client.chat.completions.stream(**asked, stop=whole[-1]) as stream:
    message = stream.get_final_completion().choices[0].message
  assert message.role == 'assistant'
  assert message.content == whole[: whole.index(whole[-1])]
  assert len(message.content) > 1


def test_settings_reach_the_engine(client, alone):
  plain = {'max_new_tokens': 8, 'seed': 3, 'temperature': 1}
  (without,) = alone.generate(['how'], **plain)
  for settings in (
    {'frequency_penalty': 2.0},
    {'presence_penalty': 2.0},
    {'logit_bias': {65: 100, 66: 99.5}},
    {'top_k': 2},
    {'min_p': 0.9},
    {'top_p': 0.1},
  ):
    found = client.completions.create(**TEXT, extra_body=settings)
    (expected,) = alone.generate(['how'], **plain | settings)
    assert found.choices[0].text == expected.text != without.text, settings


def test_null_is_the_default(client):
  nulls = dict.fromkeys(('reasoning_effort', 'service_tier', 'n', 'tools'))
  asked = CHAT | {'max_tokens': 1}
  assert client.chat.completions.create(**asked, **nulls).choices


def test_log_probabilities_of_a_completion(client, alone):
  found = client.completions.create(**TEXT, logprobs=2).choices[0]
  (expected,) = alone.generate(
    ['how'], max_new_tokens=8, seed=3, temperature=1, num_likeliest=2
  )
  spelled = alone.tokenizer.spelled
  logprobs = found.logprobs
  assert logprobs.tokens == [spelled(token) for token in expected.tokens]
  np.testing.assert_allclose(
    logprobs.token_logprobs, expected.log_probs, atol=1e-4
  )
  for row, token, likeliest in zip(
    *(logprobs.top_logprobs, expected.tokens, expected.likeliest), strict=True
  ):
    assert set(row) == {spelled(token), *(spelled(v) for v, _ in likeliest)}
  # Padding of the vocabulary has one spelling: the token itself counts.
  padding = TEXT | {'logit_bias': {END + 1: 100}, 'logprobs': 5}
  logged = client.completions.create(**padding).choices[0].logprobs
  assert [row[''] for row in logged.top_logprobs] == logged.token_logprobs
  # Parts of characters, and what is no text at all.
  assert spelled(alone.tokenizer.encode('é')[0]) == 'bytes:\\xc3'
  assert (spelled(END), spelled(END + 1)) == ('<eos>', '')
  # Also of a prompt that is given by its tokens.
  asked = TEXT | {'prompt': alone.tokenizer.encode('how'), 'logprobs': 2}
  pieces = list(client.completions.create(**asked, stream=True))
  columns = [piece.choices[0].logprobs for piece in pieces]
  assert sum((c.tokens for c in columns), []) == logprobs.tokens
  assert sum((c.top_logprobs for c in columns), []) == logprobs.top_logprobs


def test_log_probabilities_of_a_chat(client):
  asked = CHAT | {'max_tokens': 8, 'seed': 3, 'logprobs': True}
  found = client.chat.completions.create(**asked, top_logprobs=3).choices[0]
  content = found.logprobs.content
  assert len(content) == 8
  for place in content:
    best = [other.logprob for other in place.top_logprobs]
    assert len(best) == 3
    assert best == sorted(best, reverse=True)
    assert best[0] >= place.logprob
    assert max(best) < 0
  text = b''.join(bytes(place.bytes) for place in content)
  assert text.decode('utf-8', 'replace') == found.message.content
  pieces = client.chat.completions.create(**asked, top_logprobs=3, stream=True)
  streamed = [
    place for piece in pieces for place in piece.choices[0].logprobs.content
  ]
  assert streamed == content


# CI has it, and whoever installs the extra `dev`.
of_json = pytest.mark.skipif(
  not grammar.available(), reason='llguidance is not installed'
)


def conforms(text, schema):
  checker = jsonschema.FormatChecker()
  jsonschema.validate(json.loads(text), schema, format_checker=checker)
  return True


def of_schema(schema, strict=True):
  form = {'name': 'x', 'schema': schema, 'strict': strict}
  return {'type': 'json_schema', 'json_schema': form}


@of_json
@pytest.mark.parametrize('name', SCHEMAS)
def test_answers_conform_to_the_schema(client, name):
  schema = SCHEMAS[name]
  texts = set()
  for seed in range(0, 40, 8):
    found = client.chat.completions.create(
      **CHAT, n=8, seed=100 * seed, response_format=of_schema(schema)
    )
    for choice in found.choices:
      assert choice.finish_reason == 'stop'
      text = choice.message.content
      assert conforms(text, schema)
      texts.add(text)
  assert len(texts) > 4


@of_json
def test_json_without_a_schema(client):
  # Any object: a random model may write for ever, so it is told to close it.
  close = {ord('}') - 33: 20, ord('{') - 33: -100}
  found = client.chat.completions.create(
    **CHAT, n=6, response_format={'type': 'json_object'}, logit_bias=close
  )
  for choice in found.choices:
    assert choice.finish_reason == 'stop'
    assert isinstance(json.loads(choice.message.content), dict)
  pieces = client.chat.completions.create(
    **CHAT, stream=True, response_format=of_schema(SCHEMAS['flat'], None)
  )
  whole = ''.join(piece.choices[0].delta.content for piece in pieces)
  assert conforms(whole, SCHEMAS['flat'])


@of_json
def test_a_schema_harms_nobody(alone):
  """The same tokens beside schemas, which wait for their masks, and alone."""
  prompts = ['how', 'are', 'you'] * 3
  settings = {'max_new_tokens': 60, 'temperature': 1.0, 'seed': 5}
  expected = alone.generate(prompts, **settings)
  schemas = [SCHEMAS[name] for name in ('flat', 'nested', 'numbers')] * 3
  held = {'temperature': 1.0, 'seed': 1}
  by_itself = [
    alone.generate(['x'], schema=schema, **held)[0] for schema in schemas[:3]
  ]
  ids, held_ids = [], []
  for prompt, schema in zip(prompts, schemas, strict=True):
    held_ids.append(alone.submit('x', schema=schema, **held))
    ids.append(alone.submit(prompt, **settings))
  cancelled = alone.submit('x', schema=schemas[0])
  alone.cancel(cancelled)
  events = {}
  for event in alone.run():
    events.setdefault(event.id, []).append(event)
  found = [engine_lib.completion(events[id]) for id in ids]
  assert [c.tokens for c in found] == [c.tokens for c in expected]
  found = [engine_lib.completion(events[id]) for id in held_ids]
  assert [c.text for c in found] == [c.text for c in by_itself * 3]
  assert events[cancelled][-1].reason == 'cancelled'
  assert alone.idle


@of_json
def test_a_model_without_an_end_token_ends_its_json(run, monkeypatch):
  bytes_only = mod_jax.data.tokenizers.make('bytes')
  monkeypatch.setattr(Run, 'tokenizer', bytes_only)
  monkeypatch.setattr(Run, 'encode', lambda self, text: list(text.encode()))
  engine = Engine(run, slots=4)
  schema = SCHEMAS['nested']
  for seed in range(10):
    (found,) = engine.generate(['x'], temperature=1.0, seed=seed, schema=schema)
    assert found.reason == 'stop'
    assert max(found.tokens) < 256
    assert conforms(found.text, schema)


@of_json
def test_a_schema_that_becomes_too_complex_ends_alone(alone, monkeypatch):
  other = alone.submit('how', max_new_tokens=20)
  id = alone.submit('x', schema=SCHEMAS['flat'])
  mask = grammar.Constraint._mask

  def fail(self, token=None):
    if token is not None:
      raise UserError('too complex')
    return mask(self)

  monkeypatch.setattr(grammar.Constraint, '_mask', fail)
  reasons = {e.id: e.reason for e in alone.run() if e.reason is not None}
  assert reasons[id] == 'too_complex'
  assert reasons[other] in ('stop', 'length')


@of_json
@pytest.mark.parametrize(
  ('schema', 'message'),
  [
    ({'$ref': 'http://x/y'}, 'not supported: .*http://x/y'),
    ({'type': 'string', 'pattern': '('}, 'not supported: regex'),
    ({'enum': []}, 'not supported: Unsatisfiable'),
  ],
)
def test_bad_schemas(client, schema, message):
  with pytest.raises(openai.BadRequestError, match=message):
    client.chat.completions.create(
      **CHAT, max_tokens=3, response_format=of_schema(schema)
    )


def test_without_the_library(run, monkeypatch):
  monkeypatch.setattr(grammar, 'llguidance', None)
  engine = Engine(run, slots=1)
  with pytest.raises(UserError, match=r"pip install 'mod_jax\[json\]'"):
    engine.submit('x', schema={})


@pytest.mark.parametrize(
  ('asked', 'changes', 'message'),
  [
    (CHAT, {'n': 0}, 'n=0: Input should be greater than'),
    (CHAT, {'n': 129}, 'n=129: Input should be less than'),
    (CHAT, {'frequency_penalty': 3}, r'frequency_penalty=3.*: expected -2 to'),
    (CHAT, {'logit_bias': {'a': 1}}, 'logit_bias=.*: expected numbers by'),
    (CHAT, {'logit_bias': {'1': True}}, 'logit_bias=.*: expected numbers by'),
    (CHAT, {'seed': -1}, 'seed=-1: expected a whole'),
    (CHAT, {'top_logprobs': 3}, 'top_logprobs come with logprobs'),
    (TEXT, {'stream_options': {}}, 'stream_options come with stream'),
    (CHAT, {'response_format': {'type': 'json_schema'}}, 'json_schema belongs'),
    (CHAT, {'tools': [{'type': 'function'}]}, 'tools'),
    (TEXT, {'best_of': 3}, 'best_of=3: expected 1: ask for n choices, and'),
    (TEXT, {'logprobs': 6}, 'logprobs=6: Input should be less than'),
    (TEXT, {'echo': True}, 'echo=True'),
  ],
)
def test_bad_requests(client, asked, changes, message):
  which = client.chat if asked is CHAT else client
  with pytest.raises(openai.BadRequestError, match=message):
    which.completions.create(**{'max_tokens': 3} | asked | changes)


def test_models_by_name(client):
  assert client.models.retrieve('tiny').id == 'tiny'
  for ask in (
    lambda: client.models.retrieve('gpt-4'),
    lambda: client.completions.create(**TEXT | {'model': 'gpt-4'}),
    lambda: client.chat.completions.create(**CHAT | {'model': 'org/gpt-4'}),
  ):
    with pytest.raises(openai.NotFoundError, match="gpt-4.*has 'tiny'") as got:
      ask()
    assert got.value.code == 'model_not_found'


def scrape(client, key):
  """Returns values by name and labels of /metrics."""
  address = f'http://{client.base_url.host}:{client.base_url.port}/metrics'
  headers = {'Authorization': f'Bearer {key}'}
  reply = client._client.get(address, headers=headers)
  families = text_string_to_metric_families(reply.content.decode())
  samples = (sample for family in families for sample in family.samples)
  return {
    (x.name.removeprefix('mod_jax_'), *x.labels.values()): x.value
    for x in samples
  }


def test_metrics_and_the_key(run):
  engine = Engine(run, slots=2)
  with serving(engine, run, queue=6, key='secret') as stranger:
    port = stranger.base_url.port
    for wrong in (stranger, client_of(port, 'secret2')):
      with pytest.raises(openai.AuthenticationError, match='needs its API key'):
        wrong.completions.create(**TEXT)
    address = f'http://127.0.0.1:{port}'
    http = stranger._client
    assert http.get(f'{address}/health').status_code == 200
    assert http.get(f'{address}/metrics').status_code == 401
    client = client_of(port, 'secret')
    found = client.completions.create(**TEXT, n=2)
    new = found.usage.completion_tokens
    with pytest.raises(openai.BadRequestError):
      client.completions.create(**TEXT, n=0)
    values = scrape(client, 'secret')
    assert values['requests_total', '/v1/completions', '200'] == 1
    assert values['requests_total', '/v1/completions', '400'] == 1
    assert values['prompt_tokens_total',] == 3
    assert values['new_tokens_total',] == new
    assert values['new_tokens_per_second',] == pytest.approx(new / 10)
    ended = {k[1]: v for k, v in values.items() if k[0] == 'choices_total'}
    assert sum(ended.values()) == 2
    assert set(ended) <= {'stop', 'length'}
    assert 0 < values['blocks_skipped_ratio',] < 0.5
    idle = ('running', 'waiting', 'cache_filled_ratio')
    assert [values[name,] for name in idle] == [0, 0, 0]
    assert values['healthy',] == 1


@pytest.mark.parametrize('flags', [[], ['--api_key=']])
def test_an_empty_key_is_refused(flags, monkeypatch):
  """As from an unset shell variable; else everybody would be served."""
  monkeypatch.setenv('MOD_JAX_API_KEY', '' if not flags else 'secret')
  monkeypatch.setattr('sys.argv', ['mod-jax-serve', '--model=here', *flags])
  command_line.assert_refused(command_line.call(serve.run), 'key is empty')


def test_the_rule_is_chosen_by_name(folder, monkeypatch):
  argv = ['mod-jax-serve', f'--model={folder}', '--rule=threshold']
  monkeypatch.setattr('sys.argv', argv)
  # With another rule it would serve, and not end.
  monkeypatch.setattr(serve.Engine, 'warm_up', lambda *_: sys.exit('started'))
  # The model was trained for the router's rule alone.
  command_line.assert_refused(
    command_line.call(serve.run), "rule='threshold' cannot generate"
  )


def test_the_name_is_that_of_the_folder(folder, monkeypatch):
  monkeypatch.chdir(folder)
  monkeypatch.setattr('sys.argv', ['mod-jax-serve', '--model=.'])
  monkeypatch.setattr(
    server_lib, 'app', lambda *_, name, **kwargs: sys.exit(name)
  )
  assert command_line.call(serve.run).status == folder.name


def test_a_server_tells_its_progress_and_drains(folder, tmp_path):
  log = tmp_path / 'log'
  environment = os.environ | {
    'MOD_JAX_API_KEY': 'secret',
    'HOME': str(tmp_path),
  }
  del environment['JAX_COMPILATION_CACHE_DIR']
  command = [sys.executable, '-m', 'mod_jax.scripts.serve', '--port=0']
  command += [f'--model={folder}', '--slots=1', '--drain_seconds=300']
  with log.open('w') as out:
    process = subprocess.Popen(
      [*command, '--max_length=390'], stdout=out, stderr=out, env=environment
    )
  try:
    while not (found := re.search(r'http://127.0.0.1:(\d+)', log.read_text())):
      assert process.poll() is None, log.read_text()
      time.sleep(0.1)
    lines = re.findall(r'^compiling (.*)$', log.read_text(), re.M)
    assert lines[0] == '1 of 8: prompts of up to 8 tokens'
    assert lines[1] == '2 of 8: penalties, biases and schemas'
    assert lines[-1] == '8 of 8: prompts of up to 389 tokens'
    assert any((tmp_path / '.cache/mod_jax/programs').iterdir())
    port = int(found[1])
    with pytest.raises(openai.AuthenticationError):
      client_of(port).models.list()
    client = client_of(port, 'secret')
    (model,) = client.models.list()
    asked = TEXT | {'model': model.id, 'max_tokens': 380, 'stream': True}
    stream = iter(client.completions.create(**asked, logit_bias={END: -100}))
    next(stream)
    process.send_signal(signal.SIGTERM)
    # What runs goes on to its end, and nobody else is let in.
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == 'length'
    process.wait(60)
    with pytest.raises(openai.APIConnectionError):
      client.models.list()
  finally:
    process.kill()
    process.wait()
