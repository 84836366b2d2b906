"""What pictures of experts need of a model: who takes whom, and how many."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import viz
from mod_jax.layers.experts import Assigned, ExpertMLPConfig
from mod_jax.layers.mode import Mode


def blocks(model) -> list[int]:
  """Returns the numbers of the blocks with experts, given a model's config."""
  slots = [layer.block.mlp for layer in model.stack.layers]
  return [i for i, s in enumerate(slots) if isinstance(s, ExpertMLPConfig)]


def takers(
  layers: Sequence[Assigned], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns who takes each token, over all tokens of the sequences.

  Args:
    layers: what R blocks with experts tell; routed ones of their own tokens.
    length: L, the tokens of a sequence.

  Returns:
    expert_RBL, more_RBL and dropped_RBL, as of `viz.expert_map`.
  """
  found = []
  for assigned in jax.device_get(list(layers)):
    ran_BKE = np.asarray(assigned.ran_BLE)
    experts = ran_BKE.shape[-1]
    logits_BKE = assigned.logits_BLX[..., :experts]
    first_BK = np.where(ran_BKE, logits_BKE, -np.inf).argmax(axis=-1)
    wanted_BKE = assigned.wanted_BLX[..., :experts]
    b_N, k_N = np.nonzero(assigned.valid_BL)
    place_N = k_N
    if assigned.index_BL is not None:
      place_N = assigned.index_BL[b_N, k_N]
    place = b_N, place_N
    of_block = []
    for value_BK, elsewhere in (
      (
        np.where(ran_BKE.any(axis=-1), first_BK, viz.NO_EXPERT),
        viz.NOT_THERE,
      ),
      (ran_BKE.sum(axis=-1) > 1, False),
      ((wanted_BKE & ~ran_BKE).any(axis=-1), False),
    ):
      value_BL = np.full((len(ran_BKE), length), elsewhere)
      value_BL[place] = value_BK[b_N, k_N]
      of_block.append(value_BL)
    found.append(of_block)
  return tuple(np.stack(values) for values in zip(*found, strict=True))


def load_picture(task, params, model_state, mode: Mode, title: str):
  """Draws how many held-out tokens each expert takes.

  Args:
    task: a `plain.Plain` of a model with experts.
    params: parameters.
    model_state: other collections.
    mode: how routed blocks and experts choose.
    title: of the picture.
  """
  key = jax.random.key(task.config.seed)
  experts = task.config.model.experts

  @jax.jit
  def count(params, model_state, batch):
    """Returns counts of choices, of tokens without any expert, of tokens."""
    output = task.apply(params, model_state, batch, key, mode)
    # Rows that only fill the batch do not count.
    real_B11 = task.modality.token_weights(batch).any(axis=-1)[:, None, None]
    counts = []
    for assigned in output.experts:
      ran_BLE = assigned.ran_BLE & real_B11
      null_BLZ = assigned.wanted_BLX[..., ran_BLE.shape[-1] :] & real_B11
      there_BL = assigned.valid_BL & real_B11[..., 0]
      counts.append(
        (
          jnp.concatenate([ran_BLE, null_BLZ], axis=-1).sum(axis=(0, 1)),
          jnp.sum(there_BL & ~ran_BLE.any(axis=-1)),
          there_BL.sum(),
        )
      )
    return counts

  settings, total = task.config.evaluation, None
  for batch in task.eval_batches(
    batch_size=settings.batch_size, num_batches=settings.final_batches or None
  ):
    counts = jax.device_get(count(params, model_state, batch))
    # As integers of Python's size, which cannot overflow.
    counts = jax.tree.map(lambda x: np.asarray(x, np.int64), counts)
    total = counts if total is None else jax.tree.map(np.add, total, counts)
  count_RX, none_R, tokens_R = (np.stack(x) for x in zip(*total, strict=True))
  tokens_R = np.maximum(tokens_R, 1)
  targets_X = experts.per_token * np.array(experts.targets)
  if experts.choice == 'expert':  # Which choose tokens, and no token a no-op.
    of_tokens = experts.capacity_factor * experts.share / experts.num_experts
    targets_X = np.full(experts.num_experts, min(of_tokens, 1.0))
    count_RX = count_RX[:, : experts.num_experts]
  return viz.expert_load(
    count_RX / tokens_R[:, None],
    layers=blocks(task.config.model),
    num_experts=experts.num_experts,
    targets_X=targets_X,
    none_R=none_R / tokens_R,
    title=title,
  )
