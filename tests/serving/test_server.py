"""The server, by the client that everybody has."""

import concurrent.futures
import contextlib
import json
import socket
import sys
import time

import jinja2
import openai
import pytest
from tiny_server import END, export, serving

import mod_jax
from mod_jax.errors import UserError
from mod_jax.serving import chat, text_process
from mod_jax.serving import server as server_lib
from mod_jax.serving.engine import Engine

pytestmark = pytest.mark.slow

LENGTH = 48
JSON = {'Content-Type': 'application/json'}
# The last ones are what a stranger's may do.
TEMPLATE = (
  '{% if messages[0].content == "loop" %}{% for i in range(99999) %}'
  '{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}'
  '{% if messages[0].content == "memory" %}{{ "a" * 4000000000 }}{% endif %}'
  '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
  '{% if add_generation_prompt %}assistant: {% endif %}'
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  # A pattern that backtracks on many `a` before another letter.
  return mod_jax.load(export(folder, LENGTH, TEMPLATE, split='(a+)+$'))


@pytest.fixture(scope='module')
def engine(run):
  return Engine(run, slots=2)


@pytest.fixture(scope='module')
def client(run, engine):
  with serving(engine, run) as client:
    yield client


@pytest.fixture(scope='module')
def alone(run):
  """An engine that no server has."""
  return Engine(run, slots=2)


def test_a_stream_is_the_whole_in_pieces(client):
  asked = {'model': 'tiny', 'prompt': 'how', 'max_tokens': 20, 'seed': 1}
  whole = client.completions.create(**asked).choices[0]
  chunks = list(client.completions.create(**asked, stream=True))
  assert ''.join(chunk.choices[0].text for chunk in chunks) == whole.text
  reasons = [chunk.choices[0].finish_reason for chunk in chunks]
  assert reasons[-1] == whole.finish_reason
  assert not any(reasons[:-1])
  assert len(chunks) > 2
  *others, last = client.completions.create(
    **asked, stream=True, stream_options={'include_usage': True}
  )
  assert {chunk.to_dict()['usage'] for chunk in others} == {None}
  assert not any('usage' in chunk.to_dict() for chunk in chunks)
  assert last.usage.total_tokens == last.usage.prompt_tokens + 20
  stop = whole.text[2:4]
  cut = client.completions.create(**asked, stop=[stop, 'zzz']).choices[0]
  assert cut.text == whole.text[: whole.text.index(stop)]
  assert cut.finish_reason == 'stop'


def test_a_chat_follows_the_template(client, alone):
  messages = [{'role': 'user', 'content': 'how are you'}]
  asked = {'model': 'tiny', 'messages': messages, 'temperature': 0}
  found = client.chat.completions.create(**asked, max_tokens=7)
  prompt = alone.tokenizer.encode('user: how are you\nassistant: ')
  (expected,) = alone.generate([prompt], max_new_tokens=7)
  assert found.choices[0].message.content == expected.text
  chunks = client.chat.completions.create(
    **asked, max_completion_tokens=7, stream=True
  )
  pieces = [chunk.choices[0].delta.content for chunk in chunks]
  assert ''.join(pieces) == expected.text
  parts = [{'type': 'text', 'text': part} for part in ('how are', ' you')]
  asked['messages'] = [{'role': 'user', 'content': parts}]
  again = client.chat.completions.create(**asked, max_tokens=7)
  assert again.choices[0].message == found.choices[0].message
  parts[0] = {'type': 'image_url', 'image_url': {'url': 'x'}}
  with pytest.raises(openai.BadRequestError, match='reads texts alone'):
    client.chat.completions.create(**asked)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    # Refused before it is tokenised, by its tokens, and with what it asks for.
    ({'prompt': 'how ' * 9999}, '39996 bytes does not fit max_length=48'),
    ({'prompt': 'o ' * 30}, '60 tokens does not fit max_length=48'),
    ({'prompt': ['o'] * 7}, '7 prompts in one request, .*: expected 1 to 6'),
    ({'prompt': ['o'] * 10**5}, 'prompt=.*: expected .* a list of 128 of'),
    ({'prompt': [1.7, 2]}, r'prompt=\[1.7, 2\]: expected a text, tokens'),
    ({'prompt': 'a' * 40 + 'b'}, 'PanicException.*retry-limit-in-match'),
    ({'temperature': 10**400}, 'temperature=10*.*: Input should be a finite'),
    ({'stop': ['']}, 'stop=.*: expected a text of 1 to 128 characters'),
    ({'stop': ['x'] * 10**5}, 'stop=.*: expected .* a list of 16 of these'),
    ({'extra_body': {'top_q': 3}}, 'top_q=3 is not supported: leave it out'),
  ],
)
def test_bad_requests_are_refused_and_others_unharmed(client, changes, message):
  asked = {'model': 'tiny', 'prompt': 'how', 'max_tokens': 3} | changes
  with pytest.raises(openai.BadRequestError, match=message):
    client.completions.create(**asked)
  assert client.completions.create(model='tiny', prompt='how').choices


def test_what_is_no_request(client):
  http = client._client
  url = f'{client.base_url}completions'
  for body, status in (
    (b'[]', 400),
    (b'[' * 10**5, 400),
    (b'{"prompt": "how", "seed": NaN}', 400),
    (b'{"prompt": "how", "seed": 1' + b'0' * 5000 + b'}', 400),
    (b'{"prompt": "how", "top_p": "\\ud800"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "how", "\\udc00": 1}', 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "' + b'x' * 2**23, 413),
  ):
    reply = http.post(url, content=body, headers=JSON)
    assert reply.status_code == status
    assert json.loads(reply.content)['error']['message']
  # What a page of another site can have a browser send.
  body = b'{"prompt": "how"}'
  assert http.post(url, content=body, headers=JSON).status_code == 200
  for headers, status in (
    ({'Content-Type': 'text/plain'}, 415),
    (JSON | {'Host': 'elsewhere.example'}, 400),
  ):
    reply = http.post(url, content=body, headers=headers)
    assert reply.status_code == status
  for address, status in (('nothing', 404), ('completions', 405)):
    reply = http.get(f'{client.base_url}{address}')
    assert reply.status_code == status
    assert reply.json()['error']['type'] == 'invalid_request_error'


def wait_for(true):
  until = time.monotonic() + 30
  while not true():
    assert time.monotonic() < until
    time.sleep(0.01)


@contextlib.contextmanager
def stalling(engine):
  """Has an engine that is idle take thirty steps, and none after them.

  What asks for more tokens than that ends only if it is cancelled.
  """
  wait_for(lambda: engine.idle)
  step, left = Engine._step, iter(range(30))

  def limited(self):
    time.sleep(0.01)
    return next(left, None) is not None and step(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Engine, '_step', limited)
    yield


def test_what_a_client_leaves_is_cancelled(client, engine):
  asked = {'model': 'tiny', 'prompt': 'h', 'max_tokens': 40, 'temperature': 0}
  with stalling(engine):
    stream = client.completions.create(**asked, stream=True)
    next(iter(stream))
    assert not engine.idle
    stream.close()
    wait_for(lambda: engine.idle)
  # Without streaming, and while tokens come one after another.
  with stalling(engine):
    with pytest.raises(openai.APITimeoutError):
      client.with_options(timeout=0.2).completions.create(**asked)
    wait_for(lambda: engine.idle)


def test_each_prompt_takes_a_place(client, engine):
  asked = {'model': 'tiny', 'max_tokens': 40, 'temperature': 0, 'stream': True}
  with stalling(engine):
    # Two slots and a queue of four.
    held = client.completions.create(**asked, prompt=['h'] * 4)
    with pytest.raises(openai.RateLimitError, match='4 of 6 places are taken'):
      client.completions.create(**asked, prompt=['h'] * 3)
    also = client.completions.create(**asked, prompt=['h'] * 2)
    held.close()
    also.close()
    wait_for(lambda: engine.idle)
  assert client.completions.create(model='tiny', prompt=['h'] * 6).choices


def test_a_strangers_template_ends_alone(client):
  asked = {'model': 'tiny', 'max_tokens': 3}
  for content, message in (
    ('loop', 'took more than 2.0 seconds of computing'),
    ('memory', 'failed: MemoryError'),
  ):
    messages = [{'role': 'user', 'content': content}]
    with pytest.raises(openai.BadRequestError, match=message):
      client.chat.completions.create(**asked, messages=messages)
  messages = [{'role': 'user', 'content': 'how'}]
  assert client.chat.completions.create(**asked, messages=messages).choices


@pytest.fixture
def make_process(run):
  """Returns a function: the process that turns the run's texts to tokens."""
  source = run.task.modality.tokenizer_source
  return lambda: text_process.TextProcess(*source, pretrained=False)


def test_time_limits_need_no_signals_of_the_server(
  make_process, tmp_path, monkeypatch
):
  """As where libtpu was loaded, which has its process ignore SIGPROF."""
  # The shell ignores them, not this process: libtpu also has timers that send
  # SIGPROF, so whoever restores its default in such a process, dies.
  python = tmp_path / 'python'
  python.write_text(
    f'#!/bin/sh\ntrap "" PROF ALRM\nexec "{sys.executable}" "$@"\n'
  )
  python.chmod(0o755)
  with monkeypatch.context() as patch:
    patch.setattr(sys, 'executable', str(python))
    process = make_process()
  chat = [{'role': 'user', 'content': 'loop'}]
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    reply = pool.submit(process.call, 'encode_chat', chat, 9)
    try:
      with pytest.raises(UserError, match='took more than 2.0 seconds'):
        reply.result(timeout=40)
    finally:
      process.stop()  # Also ends the thread, where the limit did not.


def test_tokens_are_decoded_after_a_fork_has_ended(run, make_process):
  process = make_process()
  try:
    tokens = run.tokenizer.encode('how are')
    assert process.decode_after([], tokens) == 'how are'
    with pytest.raises(UserError, match='failed: TypeError'):
      process.decode_after([], 3)
    assert process.decode_after([], tokens) == 'how are'
  finally:
    process.stop()
  assert not process.alive


def test_special_tokens_of_a_template_are_no_long_text(tmp_path):
  export(tmp_path, LENGTH, '{% for m in messages %}<eos>{% endfor %}')
  texts = text_process._Texts('huggingface', str(tmp_path), pretrained=False)
  (tokens,) = texts.encode_chat([{'role': 'user'}] * LENGTH, LENGTH)
  assert tokens == [END] * LENGTH


def test_templates_have_what_hugging_face_gives_them(tmp_path):
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps(
      {'bos_token': {'content': '<s>'}, 'eos_token': '</s>', 'pad_token': '<p>'}
    )
  )
  (tmp_path / 'chat_template.jinja').write_text(
    '{{ bos_token }}{{ pad_token }}{% for m in messages %}'
    '{% if loop.index > 2 %}{% break %}{% endif %}'
    '{% generation %}{{ m | tojson }}{% endgeneration %}'
    '{% endfor %}{{ eos_token }} {{ [1] | tojson(indent=1) }}'
    '{% if strftime_now is defined %} {{ strftime_now("%Y") | length }}'
    '{% endif %}'
  )
  template = chat.read_template(tmp_path)
  messages = [{'content': "<b> & 'é'"}, {}, {'content': 'left out'}]
  assert template.render(messages=messages) == (
    '<s><p>{"content": "<b> & \'é\'"}{}</s> [\n 1\n] 4'
  )
  (tmp_path / 'chat_template.jinja').write_text('{{ raise_exception("no") }}')
  with pytest.raises(jinja2.TemplateError, match='no'):
    chat.read_template(tmp_path).render()
  # There are no tools, which is said.
  (tmp_path / 'chat_template.jinja').write_text(
    '{% for x in (tools, documents) %}{% if x is not none %}{{ x | length }}'
    '{% endif %}{% endfor %}{% generation %}{% set messages = 1 %}'
    '{% endgeneration %}{{ messages }}'
  )
  messages = [{'content': 'how', 'tool_calls': None}]
  text = chat.render('huggingface', tmp_path, messages)
  assert text == "[{'content': 'how'}]"


def test_a_template_is_where_the_tokenizer_is(tmp_path):
  """Be it named by its file, or by its directory."""
  fields = tmp_path / 'tokenizer_config.json'
  tools = {'name': 'tool_use', 'template': 'tools'}
  default = {'name': 'default', 'template': 'hello'}
  for template in ('hello', [tools, default]):
    fields.write_text(json.dumps({'chat_template': template}))
    for path in (tmp_path, tmp_path / 'tokenizer.json', str(tmp_path)):
      assert chat.read_template(path).render() == 'hello'
  for others in ([tools], [{'name': 'default'}], ['default'], 1):
    fields.write_text(json.dumps({'chat_template': others}))
    assert chat.read_template(tmp_path) is None
  for damaged in (b'[1]', b'[' * 9999, b'\xff'):
    fields.write_bytes(damaged)
    assert chat.read_template(tmp_path / 'tokenizer.json') is None
  loops = '{% for x in y %}' * 30 + '{% endfor %}' * 30
  unknown = b'{% generation %}'
  for damaged in (loops.encode(), b'{{' + b'(' * 9999, b'\xff', unknown):
    (tmp_path / 'chat_template.jinja').write_bytes(damaged)
    assert chat.read_template(tmp_path) is None


def test_nobody_waits_for_an_engine_that_has_failed(run, monkeypatch):
  asked = {'model': 'tiny', 'prompt': 'how'}
  engine = Engine(run, slots=1)
  with serving(engine, run) as client:
    health = f'http://{client.base_url.host}:{client.base_url.port}/health'
    with monkeypatch.context() as patch:
      patch.setattr(Engine, 'encode', lambda *_: 1 / 0)
      with pytest.raises(openai.InternalServerError, match='cannot be taken'):
        client.completions.create(**asked)
    # That was one request; now it is the engine.
    assert client.completions.create(**asked).choices
    assert client._client.get(health).json() == {'status': 'ok', 'requests': 0}
    # Rust's panics are no `Exception`.
    monkeypatch.setattr(Engine, 'advance', lambda _: exec('raise SystemExit'))
    for _ in range(2):
      with pytest.raises(openai.InternalServerError, match='engine has failed'):
        client.completions.create(**asked)
    reply = client._client.get(health)
    assert reply.status_code == 503
    assert 'the engine has failed' in reply.json()['status']


def test_the_server_stops_while_a_body_is_missing(run, monkeypatch):
  """SIGTERM ends the server within its limit, whoever is connected."""
  monkeypatch.setattr(server_lib, 'STOP_LIMIT', 1)
  with serving(Engine(run, slots=1), run) as client:
    host = client.base_url.host, client.base_url.port
    with socket.create_connection(host) as half:
      half.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n')
      half.sendall(b'Content-Type: application/json\r\n')
      half.sendall(b'Content-Length: 9\r\n\r\n{')
