"""Pure array functions that choose tokens and put them back; no Flax modules.

They work on `[B, L]` scores and static counts:

* `selection`: top-k and causal choices with static shapes, gather, scatter;
* `gates`: factor on the update of a chosen token, by its score;
* `dispatch`: moves tokens to the experts that they chose, and back;
* `controls`: scores that ignore the tokens;
* `merging`: similar tokens that are merged into one;
* `schedules`: capacity over depth and over training;
* `thresholds`: the moving average of the k-th score.
"""

from mod_jax.routing.controls import (
  gaussian_scores,
  gaussian_threshold,
  stride_scores,
)
from mod_jax.routing.dispatch import give_slots, inverse, take
from mod_jax.routing.gates import GATES, gate
from mod_jax.routing.merging import match_tokens, merge_means, trace
from mod_jax.routing.schedules import (
  capacity_floor,
  layer_capacities,
  shifted_cosine,
)
from mod_jax.routing.selection import (
  Selection,
  for_lengths,
  gather_tokens,
  mark_tokens,
  num_chosen,
  scatter_add_tokens,
  select_decided,
  select_tokens,
  select_top_k,
)
from mod_jax.routing.thresholds import MovingThreshold, mean_of_rows

__all__ = (
  'GATES',
  'MovingThreshold',
  'Selection',
  'capacity_floor',
  'for_lengths',
  'gate',
  'gather_tokens',
  'gaussian_scores',
  'gaussian_threshold',
  'give_slots',
  'inverse',
  'layer_capacities',
  'mark_tokens',
  'match_tokens',
  'mean_of_rows',
  'merge_means',
  'num_chosen',
  'scatter_add_tokens',
  'select_decided',
  'select_tokens',
  'select_top_k',
  'shifted_cosine',
  'stride_scores',
  'take',
  'trace',
)
