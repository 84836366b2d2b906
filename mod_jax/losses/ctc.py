"""CTC (Graves et al. 2006), and error rates of transcripts."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair


def loss(
  logits_BLV: jax.Array,
  valid_BL: jax.Array,
  label_BU: jax.Array,
  count_B: jax.Array,
  *,
  blank: int = 0,
  weight_B: jax.Array | None = None,
) -> tuple[Pair, Pair]:
  """Returns the CTC loss in nats, and the number of infeasible recordings.

  A recording is infeasible if it has fewer frames than its labels take: one for
  each label and one for a blank between equal neighbours. Infeasible recordings
  have no finite loss. The first pair is (summed loss, number) of the feasible
  recordings, the second (number of infeasible ones, number of all recordings).

  Args:
    logits_BLV: logits of the characters and the blank.
    valid_BL: False for frames of padding.
    label_BU: labels, padded at the end.
    count_B: number of labels.
    blank: label of the blank.
    weight_B: 0 for rows that only fill a batch, else 1; None if all count.
  """
  padding_BU = jnp.arange(label_BU.shape[1]) >= count_B[:, None]
  loss_B = optax.ctc_loss(
    logits_BLV.astype(jnp.float32),
    1.0 - valid_BL,
    label_BU,
    padding_BU.astype(jnp.float32),
    blank_id=blank,
  )
  repeats_BU = (label_BU[:, 1:] == label_BU[:, :-1]) & ~padding_BU[:, 1:]
  fits_B = valid_BL.sum(axis=1) >= count_B + repeats_BU.sum(axis=1)
  if weight_B is None:
    weight_B = jnp.ones(len(label_BU))
  feasible_B = weight_B * fits_B
  # Not a product: 0 times the loss of an infeasible recording may be NaN.
  total = jnp.where(feasible_B > 0, loss_B, 0.0).sum()
  infeasible = (weight_B * ~fits_B).sum()
  return (total, feasible_B.sum()), (infeasible, weight_B.sum())


def edits(said: Sequence, heard: Sequence) -> int:
  """Returns the edit distance, in insertions, deletions and substitutions."""
  row = list(range(len(heard) + 1))
  for i, x in enumerate(said, 1):
    diagonal, row[0] = row[0], i
    for j, y in enumerate(heard, 1):
      diagonal, row[j] = (
        row[j],
        min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y)),
      )
  return row[-1]


def error_rate(pairs: Iterable[tuple[Sequence, Sequence]]) -> float:
  """Returns the number of edits of all pairs over the length of all references.

  The pairs are (said, heard), a reference and a transcript: words for the word
  error rate, characters for the character error rate. The result is not the
  mean of the pairs' rates, and may exceed 1. NaN if all references are empty.
  """
  total = length = 0
  for said, heard in pairs:
    total += edits(said, heard)
    length += len(said)
  return total / length if length else float('nan')


def text_rates(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
  """Returns the error rates of words and characters, `wer` and `cer`."""
  words = [(said.split(), heard.split()) for said, heard in pairs]
  return {'wer': error_rate(words), 'cer': error_rate(pairs)}
