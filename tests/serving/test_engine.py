"""Many requests at once, against one after another."""

import dataclasses

import numpy as np
import pytest
import tiny

from mod_jax.data import tokenizers
from mod_jax.errors import UserError
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.pretrained.load import Run
from mod_jax.sampling import generate
from mod_jax.serving import engine as engine_lib
from mod_jax.serving.engine import Engine
from mod_jax.serving.text_stream import TextStream

VOCAB, LENGTH = 30, 40
MOD = dataclasses.replace(
  tiny.LM,
  vocab_size=VOCAB,
  num_layers=3,
  width=16,
  num_heads=4,
  num_kv_heads=2,
  tied_head=False,
  routing=MoDConfig(capacity=0.5, offset=0, threshold_decay=0.9),
)
MODES = {
  'exact': RoutingMode(rule='router', chunk=2),
  'drop': RoutingMode(rule='threshold', overflow='drop', slack=1.0, chunk=2),
}


def make(config, **kwargs):
  run = Run(config=config, variables=tiny.variables(config))
  return Engine(run, **{'slots': 4, 'max_length': LENGTH, **kwargs}), run


@pytest.fixture(
  scope='module',
  params=[
    'drop',
    pytest.param('drop of feed-forwards', marks=pytest.mark.slow),
    pytest.param('scanned', marks=pytest.mark.slow),
    pytest.param('staged', marks=pytest.mark.slow),
    pytest.param('experts choose', marks=pytest.mark.slow),
  ],
)
def engine(request):
  config, mode = MOD, MODES.get(request.param)
  if request.param == 'drop of feed-forwards':
    routing = dataclasses.replace(MOD.routing, part='mlp')
    config, mode = dataclasses.replace(MOD, routing=routing), MODES['drop']
  if request.param == 'scanned':
    # With adaptive feed-forwards, which a routed block runs on a few rows.
    config = dataclasses.replace(
      MOD,
      routing=dataclasses.replace(MOD.routing, period=1),
      adaptive=AdaptiveConfig(num_learners=2, replace=(FFNS,)),
      scan_layers=True,
    )
    mode = MODES['exact']
  if request.param == 'staged':
    experts = ExpertsConfig(num_experts=3, num_nulls=1, compute_share=0.6)
    config, mode = dataclasses.replace(MOD, experts=experts), MODES['exact']
  if request.param == 'experts choose':
    experts = ExpertsConfig(num_experts=3, choice='expert', threshold_decay=0.9)
    # Their averages are scanned, too.
    config = dataclasses.replace(
      MOD, num_layers=1, routing=None, experts=experts, scan_layers=True
    )
    mode = RoutingMode(rule='threshold')
  return *make(config, mode=mode), mode


def requests(count, seed=0):
  """Returns prompts and settings of many kinds."""
  rng = np.random.default_rng(seed)
  found = []
  for i in range(count):
    length, new = rng.integers(1, 24), rng.integers(1, 16)
    settings = {'max_new_tokens': int(new), 'seed': i}
    if i % 2:
      settings |= {
        'temperature': 1.5,
        'top_k': int(rng.choice([0, 5])),
        'top_p': float(rng.choice([1.0, 0.8])),
      }
    found.append((rng.integers(0, VOCAB, length).tolist(), settings))
  return found


def collect(engine, asked, rng):
  """Submits at random moments; returns each request's completion."""
  found, waiting, ids = {}, list(asked), []
  while waiting or not engine.idle:
    for _ in range(min(len(waiting), rng.integers(0, 4))):
      prompt, settings = waiting.pop(0)
      ids.append(engine.submit(prompt, **settings))
    for event in engine.advance():
      found.setdefault(event.id, []).append(event)
  return [engine_lib.completion(found[id]) for id in ids]


def test_many_requests_equal_one_after_another(engine):
  engine, run, mode = engine
  asked = requests(120 if mode is MODES['drop'] else 40)
  got = collect(engine, asked, np.random.default_rng(1))
  # An engine of one slot has programs of its own: once is enough.
  alone = engine
  if mode is MODES['drop']:
    alone = Engine(run, slots=1, max_length=LENGTH, mode=mode)
  for i, ((prompt, settings), completion) in enumerate(
    zip(asked, got, strict=True)
  ):
    assert completion.reason == 'length'
    assert len(completion.tokens) == settings['max_new_tokens']
    if i % 5 == 0:  # Greedy and sampled, in a slot of its own.
      (other,) = alone.generate([prompt], **settings)
      assert other.tokens == completion.tokens
      np.testing.assert_allclose(
        other.log_probs, completion.log_probs, atol=1e-3
      )
    if i % 40 == 0:  # Greedy, by the function, which compiles for each length.
      expected = generate(
        run.config.build(),
        run.variables,
        np.array([prompt]),
        max_new_tokens=settings['max_new_tokens'],
        mode=mode or RoutingMode(),
        temperature=0.0,
        max_length=LENGTH,
      )
      tokens = expected.tokens_BN[0, : len(completion.tokens)]
      assert completion.tokens == tuple(tokens.tolist())


@pytest.fixture(scope='module')
def plain():
  return make(MOD, mode=MODES['exact'])


@pytest.mark.slow
def test_caches_are_written_in_place(plain):
  engine, _ = plain
  engine.submit([1, 2, 3], max_new_tokens=3)
  before = engine._state.cache.blocks[0].key_BGSC
  list(engine.run())
  assert before.is_deleted()


def test_cancelled_and_refused_requests_harm_nobody(plain):
  engine, _ = plain
  asked = requests(12, seed=5)
  expected = collect(engine, asked, np.random.default_rng(0))
  rng = np.random.default_rng(6)
  ids, found, cancelled = [], {}, []
  for prompt, settings in asked:
    cancelled.append(engine.submit([3, 1, 4], max_new_tokens=30))
    ids.append(engine.submit(prompt, **settings))
    with pytest.raises(UserError):
      engine.submit([VOCAB], max_new_tokens=3)
    for event in engine.advance():
      found.setdefault(event.id, []).append(event)
    if rng.integers(2):  # Some wait still, and some have begun.
      engine.cancel(cancelled[rng.integers(len(cancelled))])
  for id in cancelled:
    engine.cancel(id)
  engine.cancel(10**6)
  for event in engine.run():
    found.setdefault(event.id, []).append(event)
  assert [engine_lib.completion(found[id]) for id in ids] == [
    dataclasses.replace(e, log_probs=pytest.approx(e.log_probs, abs=1e-3))
    for e in expected
  ]
  reasons = {engine_lib.completion(found[id]).reason for id in cancelled}
  assert reasons <= {'cancelled', 'length'}
  assert 'cancelled' in reasons
  # A request that has ended says nothing more.
  for events in found.values():
    assert [e.reason is not None for e in events].index(True) == len(events) - 1


def test_events_wait_for_the_next_iterator(plain):
  engine, _ = plain
  prompts, found = [[3, 4], [5], [6, 7, 8]], []
  expected = engine.generate(prompts, max_new_tokens=4)
  ids = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
  while not engine.idle:
    found.append(next(engine.run()))
  assert expected == [
    engine_lib.completion([event for event in found if event.id == id])
    for id in ids
  ]


def test_generating_leaves_the_requests_of_others_alone(plain):
  _, run = plain
  engine = Engine(run, slots=1, max_length=LENGTH, mode=MODES['exact'])
  mine = engine.submit([3, 4], max_new_tokens=4)
  with pytest.raises(UserError, match='max_new_tokens=0'):
    engine.generate([[5]], max_new_tokens=0)
  (other,) = engine.generate([[5]], max_new_tokens=9)
  assert len(other.tokens) == 9
  events = list(engine.run())
  assert {event.id for event in events} == {mine}
  want = engine.generate([[3, 4]], max_new_tokens=4)
  assert [engine_lib.completion(events)] == want
  assert engine.idle


def test_texts_that_fail_end_their_own_request(plain):
  _, run = plain
  engine = Engine(run, slots=2, max_length=LENGTH, mode=MODES['exact'])
  other = engine.submit([3, 4], max_new_tokens=4)

  class Broken:
    def decode_after(self, before, ids):
      raise UserError('no text')

  engine.tokenizer = Broken()
  broken = engine.submit([3, 4], max_new_tokens=4)
  ends = {e.id: e.reason for e in engine.run() if e.reason is not None}
  assert ends == {other: 'length', broken: 'failed'}


class TestText:
  def stream(self, text, *stop):
    """Returns the pieces of a text that comes byte by byte, and the end."""
    stream = TextStream(tokenizers.make('bytes'), [], stop)
    pieces = []
    for token in text.encode():
      pieces.append(stream.add(token))
      if stream.stopped:
        break
    return pieces, stream.end(), stream.stopped

  def test_what_may_become_a_stop_text_is_held_back(self):
    pieces, rest, stopped = self.stream('one, two; three', ', three', '; th')
    assert (''.join(pieces), rest, stopped) == ('one, two', '', True)
    assert pieces[3:7] == ['', '', '', ', tw']
    pieces, rest, stopped = self.stream('one; t', '; th')
    assert (''.join(pieces), rest, stopped) == ('one', '; t', False)

  @pytest.mark.parametrize(
    'stray', [b'', b'\xff', b'\xff\xfe', b'\xf0\x9f', '\ufffd'.encode()]
  )
  def test_what_follows_a_byte_astray_is_not_lost(self, stray):
    data = stray + '😀中a'.encode() + b'\xe2'
    stream = TextStream(tokenizers.make('bytes'), [], ())
    pieces = [stream.add(byte) for byte in data]
    assert ''.join(pieces) + stream.end() == data.decode('utf-8', 'replace')
    # Characters come whole, and what is none in the end.
    assert pieces[-5:] == ['', '', '中', 'a', '']


class _Words:
  """A tokenizer of one letter a token, whose tokens 1 and 2 end a text."""

  end_ids, vocab_size = (1, 2), VOCAB
  decode_after = tokenizers.Tokenizer.decode_after

  def encode(self, text):
    return [ord(c) - 97 for c in text]

  def decode(self, tokens):
    return ''.join(chr(97 + token) for token in tokens)


def test_stop_texts_and_the_end_token(plain, monkeypatch):
  _, run = plain
  monkeypatch.setattr(Run, 'tokenizer', _Words())
  engine = Engine(run, slots=2, max_length=LENGTH, mode=MODES['exact'])
  (whole,) = engine.generate(['fgh'], max_new_tokens=12, temperature=2.0)
  text = whole.text
  assert len(text) > 4
  (cut,) = engine.generate(
    ['fgh'], max_new_tokens=12, temperature=2.0, stop=text[3:5]
  )
  assert (cut.text, cut.reason) == (text[: text.index(text[3:5])], 'stop')
  ended = [
    c
    for seed in range(40)
    for c in engine.generate(
      ['b'], max_new_tokens=12, temperature=2.0, seed=seed
    )
    if c.reason == 'stop'
  ]
  assert ended
  for c in ended:
    assert not {1, 2} & set(c.tokens)
    assert len(c.tokens) == len(c.text) < 12
