"""Data for the pictures of experts: which tokens they take, and how many."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import viz
from mod_jax.layers.experts import Assigned, ExpertMLPConfig
from mod_jax.layers.mode import Mode


def blocks(model) -> list[int]:
  """Returns the indices of the blocks with experts, from a model's config."""
  slots = [layer.block.mlp for layer in model.stack.layers]
  return [i for i, s in enumerate(slots) if isinstance(s, ExpertMLPConfig)]


def takers(
  layers: Sequence[Assigned], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns expert_RBL, more_RBL and dropped_RBL of sequences of L tokens.

  expert_RBL has, of the experts that ran on a token, the one with the largest
  logit, or `viz.NO_EXPERT`; padding and tokens that a routed block does not
  process are `viz.NOT_THERE`. more_RBL says whether further experts ran on the
  token, and dropped_RBL whether an expert that the token chose did not run.
  """
  blocks_maps = []
  for assigned in jax.device_get(list(layers)):
    ran_BKE = np.asarray(assigned.ran_BLE)
    experts = ran_BKE.shape[-1]
    logits_BKE = assigned.logits_BLX[..., :experts]
    first_BK = np.where(ran_BKE, logits_BKE, -np.inf).argmax(axis=-1)
    wanted_BKE = assigned.wanted_BLX[..., :experts]
    expert_BK = np.where(ran_BKE.any(axis=-1), first_BK, viz.NO_EXPERT)
    more_BK = ran_BKE.sum(axis=-1) > 1
    dropped_BK = (wanted_BKE & ~ran_BKE).any(axis=-1)
    b_N, k_N = np.nonzero(assigned.valid_BL)
    l_N = k_N if assigned.index_BL is None else assigned.index_BL[b_N, k_N]
    block_maps = []
    for value_BK, default in (
      (expert_BK, viz.NOT_THERE),
      (more_BK, False),
      (dropped_BK, False),
    ):
      value_BL = np.full((len(ran_BKE), length), default)
      value_BL[b_N, l_N] = value_BK[b_N, k_N]
      block_maps.append(value_BL)
    blocks_maps.append(block_maps)
  return tuple(np.stack(values) for values in zip(*blocks_maps, strict=True))


def load_picture(task, params, model_state, mode: Mode, title: str):
  """Returns a figure of how many held-out tokens each expert takes."""
  experts = task.config.model.experts

  def count(output, batch):
    """Counts each layer's tokens: by taker, without an expert, and all."""
    # Rows that only fill the batch do not count.
    real_B11 = task.modality.token_weights(batch).any(axis=-1)[:, None, None]
    counts = []
    for assigned in output.experts:
      ran_BLE = assigned.ran_BLE & real_B11
      null_BLZ = assigned.wanted_BLX[..., ran_BLE.shape[-1] :] & real_B11
      present_BL = assigned.valid_BL & real_B11[..., 0]
      counts.append(
        (
          jnp.concatenate([ran_BLE, null_BLZ], axis=-1).sum(axis=(0, 1)),
          jnp.sum(present_BL & ~ran_BLE.any(axis=-1)),
          present_BL.sum(),
        )
      )
    return counts

  num_batches, total = task.config.evaluation.final_batches, None
  for _, counts in task.over_held_out(
    count, params, model_state, num_batches, mode
  ):
    # Sums of int32 might overflow.
    counts = jax.tree.map(lambda x: np.asarray(x, np.int64), counts)
    total = counts if total is None else jax.tree.map(np.add, total, counts)
  count_RX, none_R, tokens_R = (np.stack(x) for x in zip(*total, strict=True))
  tokens_R = np.maximum(tokens_R, 1)
  targets_X = experts.per_token * np.array(experts.targets)
  if experts.choice == 'expert':  # Such models have no no-ops.
    per_token = experts.capacity_factor * experts.share / experts.num_experts
    targets_X = np.full(experts.num_experts, min(per_token, 1.0))
    count_RX = count_RX[:, : experts.num_experts]
  return viz.expert_load(
    count_RX / tokens_R[:, None],
    layers=blocks(task.config.model),
    num_experts=experts.num_experts,
    targets_X=targets_X,
    none_R=none_R / tokens_R,
    title=title,
  )
