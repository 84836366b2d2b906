"""What only some requests ask for: penalties, biases, other tokens."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.pretrained.load import Run
from mod_jax.serving import engine as engine_lib
from mod_jax.serving.engine import Engine

pytestmark = pytest.mark.slow

VOCAB, LENGTH = 30, 40
MODEL = dataclasses.replace(
  tiny.LM, vocab_size=VOCAB, routing=MoDConfig(capacity=0.5)
)
MODE = RoutingMode(rule='router')


@pytest.fixture(scope='module')
def run():
  return Run(config=MODEL, variables=tiny.variables(MODEL))


@pytest.fixture(scope='module')
def engine(run):
  return Engine(run, slots=4, max_length=LENGTH, mode=MODE)


@pytest.fixture(scope='module')
def logits_after(run):
  """Returns a function: logits after tokens, without any cache."""
  apply = jax.jit(run.config.build().apply, static_argnames='mode')

  def logits_after(tokens):
    padded_1L = np.zeros((1, LENGTH), np.int32)
    padded_1L[0, : len(tokens)] = tokens
    valid_1L = np.arange(LENGTH)[None] < len(tokens)
    output = apply(run.variables, padded_1L, valid_BL=valid_1L, mode=MODE)
    return np.asarray(output.logits_BLV)[0, len(tokens) - 1]

  return logits_after


def expected(logits_after, prompt, count, frequency=0, presence=0, bias=None):
  """Returns greedy tokens by the definition of the penalties."""
  tokens, log_probs, likeliest = [], [], []
  for _ in range(count):
    logits_V = logits_after([*prompt, *tokens])
    log_prob_V = logits_V - np.logaddexp.reduce(logits_V)
    changed_V = logits_V.copy()
    for token in set(tokens):
      changed_V[token] -= frequency * tokens.count(token) + presence
    for token, value in (bias or {}).items():
      changed_V[token] += value
    tokens.append(int(changed_V.argmax()))
    log_probs.append(log_prob_V[tokens[-1]])
    best = np.argsort(-log_prob_V)[:3]
    likeliest.append([(int(v), log_prob_V[v]) for v in best])
  return tokens, log_probs, likeliest


SETTINGS = (
  {},
  {'frequency_penalty': 1.7},
  {'presence_penalty': 2.0},
  {'frequency_penalty': -1.0, 'presence_penalty': -2.0},
  {'logit_bias': {3: 4.5, 7: -100}},
  {'frequency_penalty': 2.0, 'logit_bias': {5: 6}},
  {},
)


def test_penalties_and_biases_follow_their_definition(engine, logits_after):
  prompts = [[2 + i, 9, 4] for i in range(len(SETTINGS))]
  ids = [
    engine.submit(prompt, max_new_tokens=12, num_likeliest=3 * (i % 2), **more)
    for i, (prompt, more) in enumerate(zip(prompts, SETTINGS, strict=True))
  ]
  events = {id: [] for id in ids}
  for event in engine.run():
    events[event.id].append(event)
  changed = 0
  for i, (id, prompt) in enumerate(zip(ids, prompts, strict=True)):
    names = ('frequency_penalty', 'presence_penalty', 'logit_bias')
    changes = [SETTINGS[i].get(name, 0) for name in names]
    want, log_probs, likeliest = expected(
      logits_after, prompt, 12, *changes[:2], changes[2] or None
    )
    found = engine_lib.completion(events[id])
    assert found.tokens == tuple(want)
    # Those of the model, not of what was sampled from.
    np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-3)
    changed += want != expected(logits_after, prompt, 12)[0]
    if not i % 2:
      assert found.likeliest == ()
      continue
    for row, want_row in zip(found.likeliest, likeliest, strict=True):
      assert [token for token, _ in row] == [token for token, _ in want_row]
      np.testing.assert_allclose(
        *([p for _, p in pairs] for pairs in (row, want_row)), atol=1e-3
      )
  assert changed >= 3


def test_others_have_the_same_tokens_and_pay_nothing(engine, run):
  prompts = [[i, i + 1] for i in range(6)]
  settings = {'max_new_tokens': 10, 'temperature': 1.0, 'seed': 5}
  alone = engine.generate(prompts, **settings)
  assert engine._extras is None
  ids = []
  for prompt in prompts:
    engine.submit(prompt, max_new_tokens=7, presence_penalty=1.0, seed=1)
    ids.append(engine.submit(prompt, **settings))
  events = {}
  for event in engine.run():
    events.setdefault(event.id, []).append(event)
  mixed = [engine_lib.completion(events[id]) for id in ids]
  assert [c.tokens for c in mixed] == [c.tokens for c in alone]
  # A slot's penalties and biases end with the request.
  assert engine.generate(prompts, **settings) == alone
  assert engine._extras is None


def test_nothing_compiles_after_the_warm_up_and_memory_does_not_grow(run):
  engine = Engine(run, slots=3, max_length=24, mode=MODE)
  reports = []
  engine.warm_up(reports.append)
  # Prompts of up to 8, 16 and 23 tokens, and the programs with extras.
  assert len(reports) == 4
  assert reports[-1] == '4 of 4: prompts of up to 23 tokens'
  before = len(jax.live_arrays())
  with tiny.compilations() as compiled:
    for more in (*SETTINGS, {'num_likeliest': 20}, {'min_p': 0.1}):
      for length in (1, 9, 20):
        engine.submit([1] * length, max_new_tokens=3, temperature=1.0, **more)
    list(engine.run())
    engine.load()
  assert not compiled
  assert len(jax.live_arrays()) <= before + 8


def test_min_p(engine, logits_after):
  logits_V = logits_after([4, 4]) / 8
  kept = set(np.flatnonzero(np.exp(logits_V - logits_V.max()) >= 0.5).tolist())
  drawn = {}
  for min_p in (0.5, 0.0):
    settings = {'temperature': 8.0, 'max_new_tokens': 1, 'min_p': min_p}
    found = [engine.generate([[4, 4]], seed=i, **settings) for i in range(60)]
    drawn[min_p] = {completion.tokens[0] for (completion,) in found}
  assert len(drawn[0.5]) > 1
  assert drawn[0.5] <= kept
  assert drawn[0.0] - kept


def test_the_load(run):
  engine = Engine(run, slots=2, max_length=20, mode=MODE)
  assert engine.load() == engine_lib.Load(0, 0, 0.0, 0.0)
  for _ in range(3):
    engine.submit([1, 2, 3, 4], max_new_tokens=9)
  engine.advance()
  engine.advance()
  load = engine.load()
  # Two steps, each of which has read a token, after prompts of four.
  assert (load.running, load.waiting, load.filled) == (2, 1, 6 / 20)
  assert 0 < load.skipped < 0.5  # One block of two is routed.
  list(engine.run())
  load = engine.load()
  assert (load.running, load.waiting, load.filled) == (0, 0, 0.0)
  assert 0 < load.skipped < 0.5
