"""The record of what a routed block decided, by top-k or by a rule.

`routed.Layer` makes it; losses, rules, metrics and pictures read it. What
experts decided is `experts.Assigned`.
"""

import flax.struct
import jax

# Checkpoint name of the chosen indices. Rematerialisation saves them, because a
# recomputed top-k may choose other tokens.
SELECTION_NAME = 'mod_selection'


@flax.struct.dataclass
class Routing:
  """Routing decisions of one block, for losses, metrics and pictures.

  Attributes:
    score_BL: float32 scores.
    weight_BL: float32 factors on the update of a token if it is chosen.
    chosen_BL: whether the token was processed.
    overflow_B: int32 number of tokens that the rule chose but that got no slot.
    capacity: scalar, the fraction of tokens that the block should process.
    predictor_BL: float32 logits of the predictor, or None.
    threshold_B: float32 moving average of the k-th best score before this call,
      the same for all rows; None if the block keeps no average.
    top_k_BL: whether top-k would choose the token; None when decoding.
    kth_B: float32 lowest score among `top_k_BL`; None when decoding.
    candidate_BL: tokens among which the block chooses, while all other tokens
      enter; None if it chooses among all tokens.
  """

  score_BL: jax.Array
  weight_BL: jax.Array
  chosen_BL: jax.Array
  overflow_B: jax.Array
  capacity: jax.Array
  predictor_BL: jax.Array | None = None
  threshold_B: jax.Array | None = None
  top_k_BL: jax.Array | None = None
  kth_B: jax.Array | None = None
  candidate_BL: jax.Array | None = None
