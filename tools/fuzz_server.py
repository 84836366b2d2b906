"""A server under thousands of bad requests: none may fail or block others.

    python tools/fuzz_server.py --seed=0 --scale=1

Starts `mod-jax-serve` on a tiny model that it makes, at an address of this
machine alone, and sends it malformed and oversize requests, clients that leave,
and floods of ten times what it may hold, all of it twice; then does the same to
servers of ten folders whose tokenizer or template means harm. Meanwhile another
process asks for /health all the time. No answer may be a 500, no look at
/health take long, no memory stay behind, and SIGTERM must end each server in
time. The script prints what it measured, and ends with 1 where something did
not hold.

It is a script, and not a test, since it takes minutes.
"""

import asyncio
import atexit
import collections
import contextlib
import http.client
import json
import multiprocessing
import pathlib
import random
import re
import signal
import sys
import time

import harness
import psutil

SLOTS, QUEUE = 4, 16
STANDSTILL = 1.0  # Seconds that /health may take.
GROWTH = 32.0  # MiB that all requests may leave behind at the second time.
STOP = 15.0  # Seconds from SIGTERM to the end: the server's ten, and some.
# Values in JSON that some field, or all, should refuse.
_SHORT = """
NaN Infinity -Infinity 1e400 -1e400 1e-400 1e-320 1e39 -1 0 1 2 1.5 null true
false [] {} "" "x" [[]] [null] [1,"a"] [[1],"a"] [1.5] [-1] 4294967296
-9223372036854775809 [99999999999999999999]
"""
NASTY = (
  *_SHORT.split(),
  *(r'"\ud800"', r'["\udc00"]', r'{"\ud800": 1}', r'"\u0000"', '"é😀"'),
  *('1' + '0' * 400, '1' + '0' * 9000, '[' * 9000, '"' + 'x' * 9000 + '"'),
  '{"type": "json_object"}',
  '[{"type": "text"}]',
  '[{"role": "user", "content": [{"type": "image_url"}]}]',
  '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url":'
  ' "data:image/png;base64,AAAA"}}]}]',
  '[{"role": "user", "content": 7}]',
  '{"include_usage": 3, "x": 1}',
  *(
    '{"1": 3}',
    '{"999": 3}',
    '{"-1": 3}',
    '{"1": 1e400}',
    '{"x": 3}',
    '{"1": {}}',
  ),
  '{"type": "json_schema"}',
  '{"type": "json_schema", "json_schema": {"name": "x", "schema": true}}',
  '{"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}',
)
FIELDS = (
  *('prompt', 'messages', 'max_tokens', 'max_completion_tokens', 'seed'),
  *('temperature', 'top_p', 'top_k', 'min_p', 'stop', 'stream'),
  'stream_options',
  *('logprobs', 'top_logprobs', 'n', 'best_of', 'echo', 'suffix', 'tools'),
  *('logit_bias', 'presence_penalty', 'frequency_penalty', 'model', 'user'),
  *('response_format', 'metadata', 'x' * 300, r'\ud800', 'é', ''),
)
# Parameters as they should be.
GOOD = (
  {},
  {'n': '2'},
  {'frequency_penalty': '1.5', 'presence_penalty': '-2'},
  {'logit_bias': '{"3": 5, "7": -100}', 'top_k': '9', 'min_p': '0.05'},
)
PATHS = ('/v1/completions', '/v1/chat/completions')
MESSAGES = '[{"role": "user", "content": "how are you"}]'
TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'


class Checks:
  """What was measured, and what of it should not be."""

  def __init__(self):
    self.faults = []

  def expect(self, holds, what):
    print(f'  {"ok  " if holds else "FAIL"} {what}', flush=True)
    if not holds:
      self.faults.append(what)

  def statuses(self, name, counts, allowed):
    told = ', '.join(
      f'{n} × {status}' for status, n in sorted(counts.items(), key=str)
    )
    bad = {s: n for s, n in counts.items() if s not in allowed}
    self.expect(not bad, f'{name}: {told}')


# The model.


def make_model(folder: pathlib.Path) -> None:
  """Writes a folder of a tiny model, with a tokenizer and a template."""
  from flax import linen as nn
  import jax
  import tokenizers

  import mod_jax
  from mod_jax.data.text import TextDataConfig
  from mod_jax.layers.routing_config import MoDConfig
  from mod_jax.models.lm import LMConfig
  from mod_jax.pretrained.load import Run
  from mod_jax.tasks import make_task
  from mod_jax.tasks.experiment import ExperimentConfig

  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {c: i for i, c in enumerate(alphabet)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = byte_level
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  folder.mkdir()
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'chat_template.jinja').write_text(TEMPLATE)
  config = ExperimentConfig(
    model=LMConfig(
      vocab_size=256,
      num_layers=2,
      width=16,
      num_heads=2,
      routing=MoDConfig(capacity=0.5),
    ),
    data=TextDataConfig(
      length=256, tokenizer='huggingface', tokenizer_path=str(folder)
    ),
  )
  task = make_task(config)
  variables = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
  run = Run(
    config=config.model, variables=variables, experiment=config, task=task
  )
  mod_jax.export(run, folder)


def hostile_folders(good: pathlib.Path, root: pathlib.Path):
  """Yields (what it does, folder, a text that makes it) of ten folders."""
  loop = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}'
  loop += '{% endfor %}'
  double = '{% set x = namespace(s="a") %}{% for i in range(60) %}'
  double += '{% set x.s = x.s + x.s %}{% endfor %}{{ x.s | length }}'
  recursion = '{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}'
  escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

  def replace(pattern, content):
    return {
      'type': 'Replace',
      'pattern': {'Regex': pattern},
      'content': content,
    }

  def sequence(key, parts):
    return {'type': 'Sequence', key: parts}

  split = {'type': 'Split', 'pattern': {'Regex': '(a+)+$'}}
  split |= {'behavior': 'Isolated', 'invert': False}
  many = 'a' * 40 + 'b'
  tenfold = [replace('.', 'a' * 10)] * 12
  slow = ('a' * 11 + 'c') * 20
  backtracks = sequence('normalizers', [replace('(a|a)+b', 'x')] * 999)
  for i, (name, template, fields, text) in enumerate(
    (
      ('template loops', loop, {}, 'a'),
      ('template asks for memory', '{{ "a" * 4000000000 }}', {}, 'a'),
      ('template doubles a text', double, {}, 'a'),
      ('template recurses', recursion, {}, 'a'),
      ('template leaves the sandbox', escape, {}, 'a'),
      (
        'template raises what is no character',
        '{{ raise_exception("%c" % 55296) }}',
        {},
        'a',
      ),
      ('tokenizer panics', TEMPLATE, {'pre_tokenizer': split}, many),
      ('tokenizer backtracks', TEMPLATE, {'normalizer': backtracks}, slow),
      (
        'decoder panics',
        TEMPLATE,
        {
          'decoder': sequence(
            'decoders', [replace('.', many), replace('(a+)+$', '')]
          )
        },
        'a',
      ),
      (
        'decoder grows',
        TEMPLATE,
        {'decoder': sequence('decoders', tenfold)},
        'a',
      ),
    )
  ):
    folder = root / f'hostile{i}'
    folder.mkdir()
    for file in good.iterdir():
      (folder / file.name).write_bytes(file.read_bytes())
    (folder / 'chat_template.jinja').write_text(template)
    tokenizer = json.loads((good / 'tokenizer.json').read_text()) | fields
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
    yield name, folder, text


# The server, and who asks it.


def _probe(port, pipe):
  """Asks for /health until it is stopped, and tells the longest answer."""
  longest, count, dead = 0.0, 0, 0
  pipe.send('ready')
  while not pipe.poll(0.05):
    begun = time.monotonic()
    try:
      connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
      connection.request('GET', '/health')
      dead += connection.getresponse().status != 200
      connection.close()
    except OSError:
      dead += 1
    longest = max(longest, time.monotonic() - begun)
    count += 1
  pipe.send((longest, count, dead))


class Server:
  """`mod-jax-serve`, and a process that watches it."""

  def __init__(self, folder):
    command = [sys.executable, '-m', 'mod_jax.scripts.serve', '--port=0']
    command += [f'--model={folder}', f'--slots={SLOTS}', f'--queue={QUEUE}']
    self.process = harness.Process(command)
    # Whatever becomes of this script.
    atexit.register(self.process.kill)
    found = None
    while found is None:
      if not self.process.running():
        raise harness.Failure(f'it did not start: {self.process.said[-900:]}')
      time.sleep(0.1)
      found = re.search(r'http://127.0.0.1:(\d+)', self.process.said)
    self.port = int(found[1])

  @contextlib.contextmanager
  def watched(self, checks, name):
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    prober = context.Process(target=_probe, args=(self.port, theirs))
    prober.start()
    ours.recv()
    try:
      yield
    finally:
      ours.send('stop')
      longest, count, dead = ours.recv()
      prober.join()
    checks.expect(
      longest < STANDSTILL and not dead,
      f'{name}: longest of {count} looks at /health {longest:.2f} s,'
      f' {dead} bad',
    )

  def mebibytes(self):
    process = psutil.Process(self.process.pid)
    every = [process, *process.children(recursive=True)]
    return sum(p.memory_info().rss for p in every) / 2**20

  def stop(self, checks, name):
    begun = time.monotonic()
    self.process.signal(signal.SIGTERM)
    with contextlib.suppress(harness.Failure):
      self.process.wait(60)
    took = time.monotonic() - begun
    checks.expect(took < STOP, f'{name}: SIGTERM ended it in {took:.1f} s')
    tracebacks = self.process.said.count('Traceback (most recent')
    checks.expect(not tracebacks, f'{name}: {tracebacks} tracebacks in the log')


def _request(body: bytes, path=PATHS[0], *, method='POST', length=None, **more):
  fields = {'Host': 'localhost', 'Content-Type': 'application/json'}
  fields |= {'Content-Length': len(body) if length is None else length}
  fields |= more
  head = ''.join(f'{name}: {value}\r\n' for name, value in fields.items())
  return f'{method} {path} HTTP/1.1\r\n{head}\r\n'.encode('latin-1') + body


async def ask(port, request: bytes, leave_after=None, timeout=120):
  """Returns the status of the answer; 'none' where there is none."""
  reader, writer = await asyncio.open_connection('127.0.0.1', port)
  try:
    writer.write(request)
    if leave_after is not None:
      await asyncio.sleep(leave_after)
      return 'left'
    # An answer may come, and the connection end, before all is sent.
    with contextlib.suppress(OSError):
      await writer.drain()
    async with asyncio.timeout(timeout):
      head = await reader.readuntil(b'\r\n\r\n')
      size = re.search(rb'content-length: (\d+)', head)
      # An answer to what is no HTTP ends with its connection.
      with contextlib.suppress(asyncio.IncompleteReadError):
        if size:
          await reader.readexactly(int(size[1]))
        else:
          await reader.readuntil(b'\r\n0\r\n\r\n')  # The last chunk.
    return int(head.split(b' ', 2)[1])
  except TimeoutError:
    return 'hangs'
  except (OSError, EOFError):
    return 'none'
  finally:
    writer.close()


async def flood(port, asks, at_a_time):
  """Returns how often each status was the answer."""
  free, counts = asyncio.Semaphore(at_a_time), collections.Counter()

  async def one(request, **how):
    async with free:
      counts[await ask(port, request, **how)] += 1

  await asyncio.gather(*(one(request, **how) for request, how in asks))
  return counts


# What is asked.


def body(rng, path, **changes):
  """Returns the JSON of a good request, with changes that are JSON as well."""
  fields = {'max_tokens': str(rng.randrange(1, 9)), 'seed': '1'}
  if path == PATHS[0]:
    fields['prompt'] = rng.choice(('"how"', '[1, 2]', '["how", "are"]'))
  else:
    fields['messages'] = MESSAGES
  fields |= changes
  inner = ', '.join(f'"{name}": {value}' for name, value in fields.items())
  return f'{{{inner}}}'.encode()


def malformed(rng):
  """Returns a request that is wrong somewhere, if chance will have it."""
  path = rng.choice(PATHS)
  names = rng.sample(FIELDS, rng.choice((1, 1, 1, 2, 3)))
  wrong_fields = {name: rng.choice(NASTY) for name in names}
  data = body(rng, path, **rng.choice(GOOD) | wrong_fields)
  more = {}
  wrong = rng.random()
  if wrong < 0.08:
    data = data[: rng.randrange(len(data))]
  elif wrong < 0.16:
    data = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
      data[rng.randrange(len(data))] = rng.randrange(256)
  elif wrong < 0.2:
    data = rng.randbytes(rng.randrange(200))
  elif wrong < 0.24:
    more['Content-Type'] = rng.choice(('text/plain', '', 'application/jsonx'))
  elif wrong < 0.28:
    more['Host'] = rng.choice(('elsewhere.example', '', '[', 'localhost:x'))
  elif wrong < 0.3:
    path = rng.choice(('/', '/v1', '/health', '/v1/models', '/v1/%ff', '/../'))
  elif wrong < 0.32:
    more['method'] = rng.choice(('GET', 'PUT', 'DELETE', 'OPTIONS', 'BREW'))
  elif wrong < 0.33:
    more['length'] = rng.choice((-1, 'x', 10**20))
  return _request(bytes(data), path, **more)


def oversize(rng):
  size = rng.randrange(2**19, 2**23)
  name, value = rng.choice(
    (
      ('prompt', '"' + 'how ' * (size // 4) + '"'),
      ('prompt', '[' + ','.join(['""'] * (size // 3)) + ']'),
      ('prompt', '[' + ','.join(['1'] * (size // 2)) + ']'),
      ('prompt', '[' + ','.join(['[1]'] * (size // 4)) + ']'),
      ('stop', '[' + ','.join(['"a"'] * (size // 4)) + ']'),
      ('stop', '"' + 'a' * size + '"'),
      ('user', '{' + ','.join(f'"{i}":0' for i in range(size // 10)) + '}'),
      ('tools', '[' * size),
      (
        'logit_bias',
        '{' + ','.join(f'"{i}":0' for i in range(size // 10)) + '}',
      ),
      ('messages', '[' + ','.join([MESSAGES[1:-1]] * (size // 48)) + ']'),
    )
  )
  path = PATHS[name == 'messages']
  # No more tokens, so that whatever is taken is soon done.
  return _request(body(rng, path, **{name: value, 'max_tokens': '1'}), path)


def schema(rng):
  """Returns a chat with a JSON schema that asks for much, or for nonsense."""
  depth = rng.choice((3, 30, 300, 3000))
  wide = rng.choice((2, 20, 2000))
  times = rng.choice((3, 10**3, 10**6))

  def chain(word, last):
    links = {
      f'd{i}': {word: [{'$ref': f'#/$defs/d{i + 1}'}] * 4} for i in range(12)
    }
    return {'$ref': '#/$defs/d0', '$defs': {**links, 'd12': last}}

  def text(**more):
    return {'type': 'string', **more}

  whole = rng.choice(
    (
      {'type': 'object', 'properties': {f'p{i}': {} for i in range(wide)}},
      {'type': 'array', 'items': text(), 'minItems': times, 'maxItems': times},
      text(minLength=times),
      text(minLength=3, maxLength=1),
      text(pattern=f'^(a{{0,{times}}}b?){{0,{times}}}$'),
      text(pattern='(a+)+$('),
      text(pattern='(a|aa|aaa|b)*' * min(depth, 300)),
      text(format='elsewhere'),
      {'enum': ['x' * i for i in range(wide)]},
      {'type': 'number', 'multipleOf': 1e-9, 'minimum': -1e300},
      {'not': {}},
      {'$ref': '#'},
      {'$ref': 'http://elsewhere.example/schema'},
      {'type': 'frob'},
      {'type': 'integer', 'minimum': 10**4000},
      chain('anyOf', {'type': 'integer'}),
      chain('allOf', {'type': 'integer'}),
      chain('oneOf', {'$ref': '#/$defs/d0'}),
    )
  )
  data = json.dumps(whole)
  if rng.random() < 0.2:
    data = '{"items": ' * depth + data + '}' * depth
  form = f'{{"name": "x", "schema": {data}}}'
  form = f'{{"type": "json_schema", "json_schema": {form}}}'
  more = rng.choice(GOOD) | {'response_format': form, 'max_tokens': '20'}
  return _request(body(rng, PATHS[1], **more), PATHS[1])


def leaving(rng):
  stream = rng.choice(('true', 'false'))
  path = rng.choice(PATHS)
  more = {'max_tokens': '200', 'stream': stream}
  if path == PATHS[1] and rng.random() < 0.3:
    more['response_format'] = '{"type": "json_object"}'
  data = body(rng, path, **rng.choice(GOOD), **more)
  cut = rng.random() < 0.2
  request = _request(data[:-5] if cut else data, path, length=len(data))
  return request, {'leave_after': rng.choice((0, 0.01, 0.1, 0.3))}


def attack(server, checks, rng, scale):
  """Sends everything that a server should bear."""

  def count(n):
    return max(1, round(n * scale))

  def phase(name, asks, at_a_time, allowed):
    with server.watched(checks, name):
      counts = asyncio.run(flood(server.port, asks, at_a_time))
    checks.statuses(name, counts, allowed)

  def wrong(n):
    return [(malformed(rng), {}) for _ in range(count(n))]

  # 200, since chance may leave a request as it was, or change what is ignored.
  refused = {200, 400, 404, 405, 413, 415}
  good = _request(body(rng, PATHS[0], prompt='[1, 2]'))
  longs = [
    _request(body(rng, PATHS[0], prompt='[1, 2]', max_tokens='200', **more))
    for more in GOOD
  ]

  def everything():
    phase('malformed', wrong(5000), 16, refused | {429})
    phase(
      'oversize',
      [(oversize(rng), {}) for _ in range(count(200))],
      4,
      refused - {404, 405, 415},
    )
    schemas = [(schema(rng), {}) for _ in range(count(300))]
    phase('schemas', schemas, 8, {200, 400, 413, 429})
    phase('leaving', [leaving(rng) for _ in range(count(1000))], 32, {'left'})
    begun = time.monotonic()
    # Once those that left have made room, one that asks is served.
    while asyncio.run(ask(server.port, good)) != 200:
      time.sleep(0.05)
    took = time.monotonic() - begun
    checks.expect(
      took < 2, f'leaving: their places were free {took:.2f} s later'
    )
    for number in range(count(3)):
      asks = [(rng.choice(longs), {}) for _ in range(10 * (SLOTS + QUEUE))]
      phase(f'flood {number}', asks, len(asks), {200, 429})

  # Twice, since what the first requests of each kind load stays, and so does
  # the room that the largest at a time have taken.
  everything()
  before = server.mebibytes()
  everything()
  after = server.mebibytes()
  checks.expect(
    after - before < GROWTH,
    f'memory: {before:.0f} MiB after all that, {after:.0f} MiB after it again',
  )
  ends_in_time(server, checks, 'attacked', longs[0])


def ends_in_time(server, checks, name, request):
  """Stops a server that has half a request, a whole one, and idle clients."""

  async def hold():
    half = _request(b'{', length=99)
    clients = []
    for sent in (half, request, b'', half):
      _, writer = await asyncio.open_connection('127.0.0.1', server.port)
      writer.write(sent)
      clients.append(writer)
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.stop, checks, name)
    for writer in clients:
      writer.close()

  asyncio.run(hold())


def endure(name, folder, text, checks, rng):
  """Has a hostile folder do its worst, beside requests that only use tokens."""
  server = Server(folder)
  chat = json.dumps([{'role': 'user', 'content': text}])
  quoted = json.dumps(text)
  bad = [
    _request(body(rng, PATHS[1], messages=chat), PATHS[1]),
    _request(body(rng, PATHS[0], prompt=quoted)),
  ]
  good = _request(body(rng, PATHS[0], prompt='[1, 2]', max_tokens='1'))
  decodes = 'decoder' not in name
  with server.watched(checks, name):

    async def both():
      harm = asyncio.create_task(
        flood(server.port, [(request, {}) for request in bad * 4], 4)
      )
      longest = 0.0
      while not harm.done():
        begun = time.monotonic()
        status = await ask(server.port, good)
        longest = max(longest, time.monotonic() - begun)
        assert status == (200 if decodes else 503), status
        await asyncio.sleep(0.05)
      return await harm, longest

    counts, longest = asyncio.run(both())
  # 503: what the model says cannot be turned into text.
  checks.statuses(name, counts, {200, 400} if decodes else {400, 503})
  checks.expect(
    longest < (STANDSTILL if decodes else 9),
    f'{name}: the longest of other requests took {longest:.2f} s',
  )
  ends_in_time(server, checks, name, bad[0])


def work(root, scale: float, seed: int) -> str:
  """Does what the module says, with `scale` times as many requests."""
  rng, checks = random.Random(seed), Checks()
  make_model(root / 'model')
  attack(Server(root / 'model'), checks, rng, scale)
  for name, folder, text in hostile_folders(root / 'model', root):
    endure(name, folder, text, checks, rng)
  if checks.faults:
    raise harness.Failure(f'{len(checks.faults)} faults')
  return 'no fault'


if __name__ == '__main__':
  harness.main(__doc__, work, scale=1.0)
