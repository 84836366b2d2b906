"""Decoding of CTC's logits: by the best path, or by prefix beam search."""

from collections import defaultdict

import numpy as np


def greedy(best_L: np.ndarray, blank: int = 0) -> tuple[list[int], list[int]]:
  """Returns the labels of the best path, and the frame where each one begins.

  `best_L` has the likeliest label of each frame. Repeated labels are merged,
  then blanks are removed.
  """
  starts = np.diff(best_L, prepend=-1) != 0
  frames = np.flatnonzero(starts & (best_L != blank))
  return best_L[frames].tolist(), frames.tolist()


def prefix_beam(
  log_prob_LV: np.ndarray, *, blank: int = 0, width: int = 16
) -> tuple[list[int], float]:
  """Returns the likeliest sequence of labels, and its log-probability.

  The probability is summed over all paths of the sequence: Hannun et al. 2014,
  without a language model. The result is exact if there are never more than
  `width` prefixes. A prefix has two log-probabilities: of paths that end in a
  blank, and of paths that end in its last label.
  """
  beams = {(): (0.0, -np.inf)}
  for log_prob_V in log_prob_LV:
    grown = defaultdict(lambda: (-np.inf, -np.inf))

    def add(prefix, *log_probs, grown=grown):
      grown[prefix] = tuple(map(np.logaddexp, grown[prefix], log_probs))

    for prefix, (ends_blank, ends_label) in beams.items():
      whole = np.logaddexp(ends_blank, ends_label)
      add(prefix, whole + log_prob_V[blank], -np.inf)
      for label, log_prob in enumerate(log_prob_V):
        if label == blank:
          continue
        if prefix and label == prefix[-1]:
          # A repeated label merges with the last one, except after a blank.
          add(prefix, -np.inf, ends_label + log_prob)
          add((*prefix, label), -np.inf, ends_blank + log_prob)
        else:
          add((*prefix, label), -np.inf, whole + log_prob)
    ranked = sorted(grown, key=lambda x: np.logaddexp(*grown[x]), reverse=True)
    beams = {prefix: grown[prefix] for prefix in ranked[:width]}
  best = max(beams, key=lambda x: np.logaddexp(*beams[x]))
  return list(best), float(np.logaddexp(*beams[best]))
