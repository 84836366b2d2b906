"""CTC against all paths, and decoding against the sums over them."""

import itertools

import jax
import numpy as np
import pytest

from mod_jax.losses import ctc
from mod_jax.sampling import transcripts


def by_labels(log_prob_LV, blank):
  """Returns the log-probability of all labels, summed over all paths."""
  length, vocabulary = log_prob_LV.shape
  total = {}
  for path in itertools.product(range(vocabulary), repeat=length):
    merged = [x for x, _ in itertools.groupby(path)]
    labels = tuple(x for x in merged if x != blank)
    log_prob = sum(log_prob_LV[i, x] for i, x in enumerate(path))
    total[labels] = np.logaddexp(total.get(labels, -np.inf), log_prob)
  return total


def draw(seed, length=5, vocabulary=3):
  logits = np.random.default_rng(seed).normal(size=(length, vocabulary)) * 2
  return np.float32(logits), np.asarray(jax.nn.log_softmax(logits))


@pytest.mark.parametrize('blank', [0, 2])
def test_the_loss_is_that_of_all_paths(blank):
  logits_LV, log_prob_LV = draw(0)
  expected = by_labels(log_prob_LV[:4], blank)  # The last frame is padding.
  labels = [(blank + 1) % 3, (blank + 1) % 3, (blank + 2) % 3]
  others = [(blank + 2) % 3]
  label_BU = np.array([labels, others + [0, 0]])
  (total, weight), (infeasible, count) = ctc.loss(
    np.stack([logits_LV] * 2),
    np.arange(5)[None].repeat(2, 0) < 4,
    label_BU,
    np.array([3, 1]),
    blank=blank,
  )
  assert (weight, infeasible, count) == (2, 0, 2)
  wanted = -expected[tuple(labels)] - expected[tuple(others)]
  assert total == pytest.approx(wanted, rel=1e-4)


def test_infeasible_and_empty_rows_have_no_gradient_and_are_counted():
  logits_BLV = np.stack([draw(seed)[0] for seed in range(3)])
  # With a blank between them, three equal labels take five frames.
  label_BU = np.array([[1, 1, 1], [1, 1, 2], [1, 1, 2]])
  valid_BL = np.arange(5) < np.array([4, 4, 4])[:, None]

  def loss(logits_BLV):
    return ctc.loss(
      *(logits_BLV, valid_BL, label_BU, np.array([3, 3, 3])),
      weight_B=np.float32([1, 1, 0]),
    )

  (total, weight), (infeasible, count) = loss(logits_BLV)
  assert (weight, infeasible, count) == (1, 1, 2)
  assert 0 < total < 100
  gradient = jax.grad(lambda x: loss(x)[0][0])(logits_BLV)
  assert np.abs(gradient[1]).max() > 0.01
  assert not np.any(gradient[::2])


@pytest.mark.parametrize('seed', range(5))
def test_the_beam_finds_the_likeliest_labels(seed):
  _, log_prob_LV = draw(seed)
  total = by_labels(log_prob_LV, 0)
  best = max(total, key=total.get)
  labels, log_prob = transcripts.prefix_beam(log_prob_LV, width=1000)
  assert tuple(labels) == best
  assert log_prob == pytest.approx(total[best])


def test_the_beam_may_beat_the_best_path():
  # Graves' example: the best path is two blanks, and yet `a` is likelier.
  log_prob_LV = np.log([[0.6, 0.4], [0.6, 0.4]])
  assert transcripts.greedy(log_prob_LV.argmax(-1))[0] == []
  assert transcripts.prefix_beam(log_prob_LV)[0] == [1]


def test_greedy_merges_before_it_removes_blanks():
  path = np.array([0, 3, 3, 0, 3, 1, 1, 0])
  assert transcripts.greedy(path) == ([3, 3, 1], [1, 4, 5])


def test_error_rates_are_of_the_corpus():
  pairs = [
    (['the', 'cat', 'sat'], ['the', 'cat']),
    (['a'], ['a', 'b', 'c']),
    ([], ['d']),
  ]
  assert ctc.error_rate(pairs) == pytest.approx(4 / 4)
  assert ctc.edits('kitten', 'sitting') == 3
  assert np.isnan(ctc.error_rate([([], ['d'])]))


# Word and character error rates that jiwer 4.0 gives for the same texts.
@pytest.mark.parametrize(
  ('said', 'heard', 'wer', 'cer'),
  [
    (['bana dogu', 'gilo'], ['bana dogu', 'gilo'], 0.0, 0.0),
    (['bana dogu gilo'], ['bana gilo'], 1 / 3, 5 / 14),
    (['the cat', 'a b c d'], ['that cat', 'b c d e f'], 4 / 6, 8 / 14),
    (['one'], ['one two three four'], 3.0, 5.0),
  ],
)
def test_rates_are_those_of_jiwer(said, heard, wer, cer):
  rates = ctc.text_rates([*zip(said, heard, strict=True)])
  assert rates == {'wer': pytest.approx(wer), 'cer': pytest.approx(cer)}
