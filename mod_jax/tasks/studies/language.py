"""Longer looks at a language model: at what it uses, and where it works."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy

from mod_jax import errors, viz
from mod_jax.models import lm
from mod_jax.tasks.studies import devices
from mod_jax.train.task import Study

# Of the attention maps: rows of held-out text, and tokens of each.
_SAMPLES = 16
_TOKENS = 256
_BATCHES = 16
_ROWS = 8  # At a time, where logits are needed.
_PARTS = 8  # Of the context, by which losses are told.
_DRAWS = 1000  # Of the bootstrap.
_OFTEN = 40  # A piece of text that comes less often is not listed.
_LISTED = 12  # Pieces at either end.


@devices.on_one_device
def arank(task, params, model_state) -> Study:
  """Asks of each block how much its attention tells: which ones to route.

  The ARank of γ-MoD (Luo et al. 2024): the rank of the causal attention map
  with its diagonal set to 0, a mean over heads and samples. Singular values
  count from n · 1.2e-7 of the largest on, for n tokens: what float32 resolves.
  Blocks of low rank mix their tokens least, and are suggested for routing: as
  many as are routed, or half of a dense model's. A routed block's map is that
  of the tokens that it processes under top-k, so that blocks are compared by
  rank over the largest possible one, n - 1.
  """
  config = task.config.model
  model, variables = lm.unrolled_variables(
    dataclasses.replace(config, remat='none'), {'params': params, **model_state}
  )
  # As in training, where all queries and keys are computed at once.
  model = model.build(train=True)

  @jax.jit
  def look(variables, **inputs):
    output, state = model.apply(
      variables,
      **inputs,
      rngs={'routing': jax.random.key(task.config.seed)},
      mutable=['intermediates'],
    )
    found = state['intermediates']
    return [
      {name: found[f'block_{i}']['attention'][name][0][0] for name in _SOWN}
      | ({'chosen': aux['router'].chosen_BL[0]} if 'router' in aux else {})
      for i, aux in enumerate(output.aux)
    ]

  counts_NR2 = []
  for sample in _full_rows(task):
    layers = jax.device_get(look(variables, **sample))
    position_L = np.arange(sample['tokens_BL'].shape[1])
    segment_L = np.zeros_like(position_L)
    if 'segment_BL' in sample:
      segment_L = np.asarray(sample['segment_BL'][0])
    counts_R2 = []
    for layer in layers:
      here = layer.get('chosen', np.ones(len(position_L), bool))
      at_K, of_K = position_L[here], segment_L[here]
      distance_KS = at_K[:, None] - at_K
      seen_KS = (distance_KS >= 0) & (of_K[:, None] == of_K)
      if config.window is not None:
        seen_KS &= distance_KS < config.window
      q_KHC, k_KGC = (layer[name][: len(at_K)] for name in _SOWN)
      counts_R2.append((len(at_K), mean_rank(q_KHC, k_KGC, seen_KS)))
    counts_NR2.append(counts_R2)
  tokens_R, rank_R = np.mean(counts_NR2, axis=0).T
  share_R = rank_R / np.maximum(tokens_R - 1, 1)
  routed = [i for i, c in enumerate(config.capacities) if c is not None]
  count = len(routed) or max(1, len(rank_R) // 2)
  order = np.argsort(share_R, kind='stable')
  suggested = sorted(order[:count].tolist())
  lines = [f'{"block":>9}{"tokens":>9}{"rank":>9}{"share":>9}']
  for i, (tokens, rank, share) in enumerate(
    zip(tokens_R, rank_R, share_R, strict=True)
  ):
    name = f'{i} routed' if i in routed else str(i)
    lines.append(f'{name:>9}{tokens:9g}{rank:9.2f}{share:9.2%}')
  facts = f'{len(counts_NR2)} held-out rows of {len(position_L)} tokens'
  lines.append(
    f'{facts}; singular values count from tokens x 1.2e-7 of the largest on.'
    f' Lowest share: model.routing.layers={tuple(suggested)}'
  )
  return Study(
    text='\n'.join(lines),
    metrics={
      'rank': rank_R.tolist(),
      'share': share_R.tolist(),
      'tokens': tokens_R.tolist(),
      'samples': len(counts_NR2),
      'suggested': suggested,
    },
    figures={
      'arank': viz.attention_ranks(
        share_R,
        routed=routed,
        suggested=suggested,
        facts=facts,
        title='Rank of the attention maps on held-out text',
      )
    },
  )


_SOWN = ('queries', 'keys')


def mean_rank(q_LHC, k_LGC, seen_LS) -> float:
  """Returns the rank of attention maps without their diagonals, over heads.

  Args:
    q_LHC: queries, G divides H.
    k_LGC: keys.
    seen_LS: which keys a query sees; its own among them.
  """
  length, heads, channels = q_LHC.shape
  if length < 2:
    return 0.0
  k_LHC = np.repeat(k_LGC, heads // k_LGC.shape[1], axis=1)
  logit_HLS = np.einsum('LHC,SHC->HLS', *map(np.float64, (q_LHC, k_LHC)))
  logit_HLS = np.where(seen_LS, logit_HLS / channels**0.5, -np.inf)
  weight_HLS = scipy.special.softmax(logit_HLS, axis=-1) * (1 - np.eye(length))
  tolerance = length * float(np.finfo(np.float32).eps)
  return float(np.linalg.matrix_rank(weight_HLS, rtol=tolerance).mean())


def _full_rows(task):
  """Yields what the model is called with, of single rows without padding."""
  found = 0
  for batch in task.eval_batches(
    batch_size=task.config.evaluation.batch_size, num_batches=_BATCHES
  ):
    full_B = np.asarray(task.modality.token_weights(batch) > 0).all(axis=1)
    for row in np.flatnonzero(full_B)[: _SAMPLES - found]:
      found += 1
      names = {'tokens': 'tokens_BL', 'segments': 'segment_BL'}
      yield {
        given: batch[name][row, :_TOKENS][None]
        for name, given in names.items()
        if name in batch
      }
  if not found:
    raise errors.UserError(
      'the study arank looks at held-out rows without padding, and there are'
      f' none: set data.length={task.config.data.length} lower, or give more'
      ' text.'
    )


@devices.on_one_device
def engagement(task, params, model_state) -> Study:
  """Asks whether tokens that engage more blocks are harder to go on from.

  For each held-out token: by how many of the routed blocks top-k has it
  processed, and the entropy of the model's prediction of the next token
  (Raposo et al. 2024, section 4.1, who find that they go together). Spearman's
  correlation comes with a 95% interval, bootstrapped over sequences.
  """
  mode = task.modality.modes()['top_k/']

  @jax.jit
  def look(params, model_state, batch, key):
    output = _logits(task, mode, params, model_state, batch, key)
    log_p_BLV = jax.nn.log_softmax(output.logits_BLV.astype(jnp.float32))
    entropy_BL = -jnp.sum(jnp.exp(log_p_BLV) * log_p_BLV, axis=-1)
    count_BL = sum(
      routed.chosen_BL.astype(jnp.int32) for routed in output.routing
    )
    return count_BL, entropy_BL

  found = []
  key = jax.random.key(task.config.seed)
  for batch in _few_rows(task, _BATCHES):
    count_BL, entropy_BL = look(params, model_state, batch, key)
    valid_BL = task.modality.token_weights(batch) > 0
    arrays = (count_BL, entropy_BL, valid_BL, batch['tokens'])
    found.append([np.asarray(jax.device_get(x)) for x in arrays])
  count_RL, entropy_RL, valid_RL, token_RL = map(
    np.concatenate, zip(*found, strict=True)
  )
  blocks = sum(c is not None for c in task.config.model.capacities)
  count_N, entropy_N = count_RL[valid_RL], entropy_RL[valid_RL]
  spearman, low, high = correlation(count_RL, entropy_RL, valid_RL)
  groups = {k: entropy_N[count_N == k] for k in range(blocks + 1)}
  groups = {k: values for k, values in groups.items() if len(values)}
  pieces = _pieces(
    token_RL[valid_RL], count_N / blocks, task.modality.tokenizer
  )
  lines = [f'{"routed blocks":>13}{"tokens":>10}{"entropy":>10}{"median":>10}']
  for k, values in groups.items():
    lines.append(
      f'{k:13d}{len(values) / len(count_N):10.2%}{values.mean():10.4f}'
      f'{np.median(values):10.4f}'
    )
  lines.append(
    f"Entropy of the prediction in nats. Spearman's correlation {spearman:.4f}"
    f' (95%: {low:.4f} to {high:.4f}), {len(count_N):,} held-out tokens of'
    f' {len(count_RL)} sequences, under top-k.'
  )
  return Study(
    text='\n'.join(lines),
    metrics={
      'spearman': spearman,
      'interval': [low, high],
      'tokens': len(count_N),
      'blocks': {
        str(k): {
          'share': len(values) / len(count_N),
          'entropy': float(values.mean()),
        }
        for k, values in groups.items()
      },
      'pieces': pieces,
    },
    figures={
      'entropy': viz.engagement(
        groups,
        pieces,
        listed=_LISTED,
        blocks=blocks,
        facts=f'Spearman {spearman:.3f}, 95%: {low:.3f} to {high:.3f}',
        title='Held-out text: which tokens the routed blocks process',
      )
    },
  )


@devices.on_one_device
def copying(task, params, model_state) -> Study:
  """Asks whether a language model goes on as its context did before.

  Small models learn to do so late, and within a few hundred steps, by heads
  that look for what has followed the same token (induction heads, Olsson et al.
  2022). Of two runs that differ in nothing but the seed or the number of heads,
  one may end with such heads and far ahead of the other, so that a comparison
  tells of luck. Three looks: at the held-out loss by position, which falls
  along the context as far as that is used; at the held-out loss after tokens
  that are new in their context, of which such heads know nothing, and after
  those that came before; and at random tokens that come twice, of which nothing
  but copying foretells the second time. The held-out rows are those of the
  evaluation at the end of training. Routed models choose their tokens by top-k.
  """
  mode = next(iter(task.modality.modes().values()))
  look = jax.jit(functools.partial(_token_losses, task, mode))
  key = jax.random.key(task.config.seed)
  sums_23L = 0.0
  for batch in _few_rows(task, task.config.evaluation.final_batches):
    weight_BL = np.asarray(batch['weights'])
    loss_BL = np.asarray(look(params, model_state, batch, key))
    new_BL = _new_in_context(batch['tokens'], batch.get('segments'))
    parts_3BL = weight_BL * np.stack([np.ones_like(new_BL), new_BL, ~new_BL])
    sums_23L += np.stack([loss_BL * parts_3BL, parts_3BL]).sum(axis=2)
  total_8, count_8 = (
    np.array([x.sum() for x in np.array_split(sums_L, _PARTS)])
    for sums_L in sums_23L[:, 0]
  )
  by_position = (total_8 / np.maximum(count_8, 1.0)).tolist()
  total_3, count_3 = sums_23L.sum(axis=2)
  _, after_new, after_seen = (total_3 / np.maximum(count_3, 1.0)).tolist()
  share_new = float(count_3[1] / count_3[0])
  length = task.config.data.length
  once = length // 2
  rows = len(weight_BL)
  random_BL = np.random.default_rng(0).integers(
    task.modality.tokenizer.vocab_size, size=(rows, once), dtype=np.int32
  )
  twice_BL = np.tile(random_BL, 3)[:, : length + 1]
  loss_BL = look(
    params,
    model_state,
    {
      'tokens': twice_BL[:, :-1],
      'targets': twice_BL[:, 1:],
      'weights': np.ones((rows, length), np.float32),
    },
    key,
  )
  # The last prediction of the first time is of the token that begins anew.
  first = float(loss_BL[:, : once - 1].mean())
  second = float(loss_BL[:, once : 2 * once - 1].mean())
  lines = [
    'held-out loss by position, in nats per token',
    '  '.join(f'{loss:.3f}' for loss in by_position),
    f'after tokens that are new in their context ({share_new:.0%})'
    f' {after_new:.3f}, after the others {after_seen:.3f}',
    f'random tokens: the first time {first:.3f}, the second {second:.3f}',
  ]
  return Study(
    text='\n'.join(lines),
    metrics={
      'loss': by_position,
      'after_new': after_new,
      'after_seen': after_seen,
      'share_new': share_new,
      'first': first,
      'second': second,
    },
  )


def _few_rows(task, batches: int):
  """Returns so many held-out batches (0 = all), cut into smaller ones.

  All logits of a large batch do not fit on one device.
  """
  size = task.config.evaluation.batch_size
  rows = min(size, _ROWS)
  return task.eval_batches(
    batch_size=rows, num_batches=batches * size // rows or None
  )


def _new_in_context(token_BL, segment_BL=None):
  """Returns whether no token before, of the same document, is the same."""
  new_BL = np.zeros(token_BL.shape, bool)
  for row, token_L in enumerate(token_BL):
    # Pairs of document and token, as one number each.
    if segment_BL is not None:
      token_L = token_L + (token_L.max() + 1) * segment_BL[row]
    new_BL[row, np.unique(token_L, return_index=True)[1]] = True
  return new_BL


def _token_losses(task, mode, params, model_state, batch, key):
  """Returns the cross-entropy of each token of a batch, [B, L]."""
  logits_BLV = _logits(task, mode, params, model_state, batch, key).logits_BLV
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), batch['targets']
  )


def _logits(task, mode, params, model_state, batch, key):
  """Returns the output without the targets, which would leave no logits."""
  batch = {name: x for name, x in batch.items() if name != 'targets'}
  return task.apply(params, model_state, batch, key, mode)


def correlation(x_RL, y_RL, valid_RL, seed: int = 0):
  """Returns Spearman's correlation over all tokens, and its 95% interval.

  The interval is a percentile bootstrap over rows, whose tokens are not
  independent; ranks stay those of all tokens. All three are nan where x or y
  is constant.
  """
  ranks = np.zeros((2, *x_RL.shape))
  for rank_RL, values_RL in zip(ranks, (x_RL, y_RL), strict=True):
    rank_N = scipy.stats.rankdata(values_RL[valid_RL])
    rank_RL[valid_RL] = rank_N - rank_N.mean()
  a_RL, b_RL = ranks
  # Of each row: count, sums, and sums of products.
  sums_R6 = np.stack(
    [
      x.sum(axis=1)
      for x in (valid_RL, a_RL, b_RL, a_RL**2, b_RL**2, a_RL * b_RL)
    ],
    axis=1,
  )
  rng = np.random.default_rng(seed)
  rows = len(sums_R6)
  times_DR = rng.multinomial(rows, np.full(rows, 1 / rows), _DRAWS)
  # The first draw is the data themselves.
  times_DR = np.vstack([np.ones(rows), times_DR])
  n, a, b, aa, bb, ab = (times_DR @ sums_R6).T
  with np.errstate(invalid='ignore', divide='ignore'):
    r = (ab - a * b / n) / np.sqrt((aa - a * a / n) * (bb - b * b / n))
  low, high = np.quantile(r[1:], (0.025, 0.975))
  return float(r[0]), float(low), float(high)


def _pieces(token_N, share_N, tokenizer) -> dict[str, float]:
  """Returns the mean share of the blocks by piece, of frequent ones."""
  seen = np.unique(token_N)
  sums = collections.defaultdict(lambda: np.zeros(2))
  # Several tokens may look alike, such as parts of a character.
  for token, piece in zip(seen, tokenizer.pieces(seen.tolist()), strict=True):
    of_token_N = share_N[token_N == token]
    sums[piece] += len(of_token_N), of_token_N.sum()
  shares = {
    piece: float(total / count)
    for piece, (count, total) in sums.items()
    if count >= _OFTEN
  }
  return dict(sorted(shares.items(), key=lambda item: -item[1]))
