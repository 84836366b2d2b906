"""Studies of language models: ranks, influence, routing and copying."""

import collections
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy

from mod_jax import config as config_lib
from mod_jax import errors, viz
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routed import Layer
from mod_jax.models.vlm import VLMConfig
from mod_jax.train.task import Study

# Rows of held-out text for attention maps, and tokens of each.
_SAMPLES = 16
_TOKENS = 256
_BATCHES = 16
_ROWS = 8  # Maximum rows of a batch whose logits are computed.
_PARTS = 8  # Parts of the context by which to report losses.
_DRAWS = 1000  # Resamples of the bootstrap.
_OFTEN = 40  # Minimum occurrences of a piece of text to be listed.
_LISTED = 12  # Pieces to list at either end.


def arank(task, params, model_state) -> Study:
  """Measures the rank of attention maps, and suggests which blocks to route.

  This is the ARank of γ-MoD (Luo et al. 2024): the rank of the causal attention
  map with its diagonal set to 0, averaged over heads and samples. With n
  tokens, singular values count if they exceed n · 1.2e-7 of the largest, the
  resolution of float32. Blocks of low rank mix their tokens least, and are
  suggested for routing: as many as are routed now, or half of a dense model's.
  A routed block's map covers the n tokens that it processes under top-k, so
  blocks are compared by their rank divided by its maximum, n - 1.
  """
  variables = {'params': params, **model_state}
  reads_pictures = isinstance(task.config.model, VLMConfig)
  field = 'model.language' if reads_pictures else 'model'
  config = config_lib.replace(task.config, {f'{field}.remat': 'none'}).model
  model, variables = config.unrolled(variables)
  config = config.language if reads_pictures else config
  # With `chunk=0`, all queries and keys of a block are computed at once.
  model = model.build(routing=RoutingMode(chunk=0))

  @jax.jit
  def look(variables, args, kwargs):
    output, state = model.apply(
      variables,
      *args,
      **kwargs,
      rngs={'routing': jax.random.key(task.config.seed)},
      mutable=['intermediates'],
    )
    intermediates = state['intermediates']
    if reads_pictures:
      intermediates = intermediates['language']
    return [
      {
        name: of_calls[0][0]
        for name, of_calls in intermediates[f'block_{i}']['attention'].items()
        if name in _SOWN
      }
      # If only the feed-forward is routed, all tokens enter the attention.
      | ({'chosen': aux['router'].chosen_BL[0]} if layer.caches_chosen else {})
      for i, (aux, layer) in enumerate(
        zip(output.aux, config.stack.layers, strict=True)
      )
    ]

  counts_NR2 = []
  lengths_N = []
  for args, kwargs in _single_rows(task, whole=not reads_pictures):
    layers = jax.device_get(look(variables, args, kwargs))
    position_L = np.arange(args[0].shape[1])
    segment_L = np.zeros_like(position_L)
    if kwargs.get('segment_BL') is not None:
      segment_L = np.asarray(kwargs['segment_BL'][0])
    lengths_N.append(len(position_L))
    counts_NR2.append(
      [_rank_of(x, position_L, segment_L, config.window) for x in layers]
    )
  tokens_R, rank_R = np.mean(counts_NR2, axis=0).T
  share_R = rank_R / np.maximum(tokens_R - 1, 1)
  routed = config.routed_blocks
  suggested = _lowest(share_R, len(routed))
  lines = [f'{"block":>9}{"tokens":>9}{"rank":>9}{"share":>9}']
  for i, (tokens, rank, share) in enumerate(
    zip(tokens_R, rank_R, share_R, strict=True)
  ):
    name = f'{i} routed' if i in routed else str(i)
    lines.append(f'{name:>9}{tokens:9g}{rank:9.2f}{share:9.2%}')
  facts = f'{len(counts_NR2)} held-out rows of {np.mean(lengths_N):.0f} tokens'
  lines.append(
    f'{facts}; singular values count from tokens x 1.2e-7 of the largest on.'
    f' Lowest share: {field}.routing.layers={tuple(suggested)}'
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
        title='Rank of the attention maps on what was held out',
      )
    },
  )


_SOWN = ('queries', 'keys', 'valid')


def _lowest(value_R, count: int) -> list[int]:
  """Returns the `count` blocks of lowest value, ascending; 0 returns half."""
  order = np.argsort(value_R, kind='stable')
  return sorted(order[: count or max(1, len(order) // 2)].tolist())


def _rank_of(layer, position_L, segment_L, window):
  """Returns the number of tokens in a block's attention, and the mean rank."""
  is_processed = layer.get('chosen', np.ones(len(position_L), bool))
  at_K, of_K = position_L[is_processed], segment_L[is_processed]
  distance_KS = at_K[:, None] - at_K
  seen_KS = (distance_KS >= 0) & (of_K[:, None] == of_K)
  if window is not None:
    seen_KS &= distance_KS < window
  # Remove empty slots, which may lie between others.
  real = layer.get('valid', np.s_[:])
  q_KHC, k_KGC = (layer[name][real] for name in ('queries', 'keys'))
  return len(at_K), mean_rank(q_KHC, k_KGC, seen_KS)


def mean_rank(q_LHC, k_LGC, seen_LS) -> float:
  """Returns the mean rank, over heads, of attention maps without diagonals.

  `seen_LS` are the keys that each query attends to, including its own.
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


def _single_rows(task, *, whole: bool):
  """Yields (arguments, keywords) of the model for `_SAMPLES` single rows.

  If `whole`, rows with padding are skipped, and other rows are cut to `_TOKENS`
  tokens; otherwise padding is cut off. Raises UserError if no row is left.
  """
  count = 0
  for batch in task.modality.eval_batches(
    batch_size=task.config.evaluation.batch_size, num_batches=_BATCHES
  ):
    real_BL = np.asarray(task.modality.token_weights(batch) > 0)
    taken_B = real_BL.all(axis=1) if whole else real_BL.any(axis=1)
    for row in np.flatnonzero(taken_B)[: _SAMPLES - count]:
      count += 1
      length = min(_TOKENS, real_BL.shape[1]) if whole else real_BL[row].sum()
      one = {
        name: x[row, :length][None] if x.shape == real_BL.shape else x[[row]]
        for name, x in batch.items()
      }
      if not whole:
        # Pass only the row's own pictures: routed blocks count the patches of
        # all pictures passed, and have slots for no more text than the rest.
        model = task.config.model
        tokens = (one['tokens'] == model.image_token).sum()
        one['images'] = one['images'][:, : tokens // model.num_patches]
      args, kwargs = task.modality.inputs(one, train=False)
      targets = ('targets_BL', 'weights_BL')
      yield args, {k: x for k, x in kwargs.items() if k not in targets}
  if not count:
    raise errors.UserError(
      'the study arank looks at held-out rows without padding, and there are'
      f' none: set data.length={task.config.data.length} lower, or give more'
      ' text.'
    )


def influence(task, params, model_state) -> Study:
  """Measures how far each block turns the features, to find idle blocks.

  This is the Block Influence of ShortGPT (Men et al. 2024, Eq. 1): 1 minus the
  cosine between a token's features before and after the block, averaged over
  held-out tokens. ShortGPT deletes the blocks of lowest influence. This study
  names as many blocks as are routed now, or half of a dense model's. Routed
  models choose their tokens by top-k.
  """
  config = config_lib.replace(task.config, {'model.remat': 'none'}).model
  config, variables = config.unrolled({'params': params, **model_state})
  model = config.build()

  @jax.jit
  def look(variables, batch):
    cosine_RBL = []

    def compare(call, args, kwargs, context):
      output = call(*args, **kwargs)
      if (
        isinstance(context.module, Layer) and context.method_name == '__call__'
      ):
        before_BLD, after_BLD = (
          x.astype(jnp.float32) for x in (args[0], output.x_BLD)
        )
        cosine_RBL.append(optax.cosine_similarity(before_BLD, after_BLD))
      return output

    args, kwargs = task.modality.inputs(batch, train=False)
    key = jax.random.key(task.config.seed)
    with nn.intercept_methods(compare):
      model.apply(variables, *args, **kwargs, rngs={'routing': key})
    real_BL = task.modality.token_weights(batch) > 0
    distance_RBL = jnp.where(real_BL, 1 - jnp.stack(cosine_RBL), 0)
    return distance_RBL.sum(axis=(1, 2)), real_BL.sum()

  sums = [look(variables, batch) for batch in _few_rows(task, _BATCHES)]
  total_R, tokens = (np.sum(x, axis=0) for x in zip(*sums, strict=True))
  influence_R = total_R / tokens
  suggested = _lowest(influence_R, config.num_routed)
  lines = [f'{"block":>9}{"influence":>11}']
  lines += [f'{i:9d}{value:11.4f}' for i, value in enumerate(influence_R)]
  lines.append(
    f'1 - cosine of the features before and after a block, {int(tokens):,}'
    f' held-out tokens. Lowest: model.routing.layers={tuple(suggested)}'
  )
  return Study(
    text='\n'.join(lines),
    metrics={
      'influence': influence_R.tolist(),
      'tokens': int(tokens),
      'suggested': suggested,
    },
  )


def engagement(task, params, model_state) -> Study:
  """Correlates how many routed blocks process a token with an entropy.

  Measures for each held-out token the number of routed blocks that process it
  under top-k, and the entropy of the model's prediction of the next token
  (Raposo et al. 2024, section 4.1, find a positive correlation). Spearman's
  correlation is given with a 95% interval, bootstrapped over sequences.
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

  batches = []
  key = jax.random.key(task.config.seed)
  for batch in _few_rows(task, _BATCHES):
    count_BL, entropy_BL = look(params, model_state, batch, key)
    valid_BL = task.modality.token_weights(batch) > 0
    arrays = (count_BL, entropy_BL, valid_BL, batch['tokens'])
    batches.append([np.asarray(jax.device_get(x)) for x in arrays])
  count_RL, entropy_RL, valid_RL, token_RL = map(
    np.concatenate, zip(*batches, strict=True)
  )
  blocks = task.config.model.num_routed
  count_N, entropy_N = count_RL[valid_RL], entropy_RL[valid_RL]
  spearman, low, high = correlation(count_RL, entropy_RL, valid_RL)
  groups = {k: entropy_N[count_N == k] for k in range(blocks + 1)}
  groups = {k: values for k, values in groups.items() if len(values)}
  pieces = _pieces(
    token_RL[valid_RL], count_N / blocks, task.modality.tokenizer
  )
  by_blocks = {
    str(k): {'share': len(x) / len(count_N), 'entropy': float(x.mean())}
    for k, x in groups.items()
  }
  lines = [f'{"routed blocks":>13}{"tokens":>10}{"entropy":>10}{"median":>10}']
  for k, values in groups.items():
    share, entropy = by_blocks[str(k)].values()
    median = np.median(values)
    lines.append(f'{k:13d}{share:10.2%}{entropy:10.4f}{median:10.4f}')
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
      'blocks': by_blocks,
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


def copying(task, params, model_state) -> Study:
  """Measures whether a language model copies from its context.

  Small models learn this late, and within a few hundred steps, by heads that
  look for what followed the same token before (induction heads, Olsson et al.
  2022). Of two runs that differ only in the seed or the number of heads, one
  may end with such heads and with a much lower loss; then their comparison
  shows luck. The study reports the held-out loss by position, which falls as
  far as context is used. It reports the held-out loss after repeated tokens and
  after tokens that are new in their context, where such heads do not help. And
  it reports the loss of random tokens that come twice: only copying predicts
  the second time.
  The held-out rows are those of the final evaluation. Routed models choose
  their tokens by top-k. Raises UserError if rows have too few tokens for this.
  """
  length = task.config.data.length
  errors.require(
    length >= _PARTS,
    f'at least {_PARTS} for the study copying, which tells the loss in'
    f' {_PARTS} parts of the context',
    **{'data.length': length},
  )
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
  # The last prediction of the first pass is of the first repeated token.
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
  """Returns `batches` held-out batches (0 = all), split into smaller ones.

  The logits of a large batch may not fit on one device.
  """
  size = task.config.evaluation.batch_size
  rows = max(n for n in range(1, _ROWS + 1) if size % n == 0)
  return task.modality.eval_batches(
    batch_size=rows, num_batches=batches * size // rows or None
  )


def _new_in_context(token_BL, segment_BL=None):
  """Returns whether each token occurs for the first time in its document."""
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
  """Calls the model without targets; then its output has logits."""
  batch = {name: x for name, x in batch.items() if name != 'targets'}
  return task.apply(params, model_state, batch, key, mode)


def correlation(x_RL, y_RL, valid_RL, seed: int = 0):
  """Returns Spearman's correlation over all tokens, and its 95% interval.

  The interval is a percentile bootstrap over rows, since tokens of a row are
  not independent; ranks are computed once, over all tokens. Correlation and
  interval are NaN if x or y is constant.
  """
  ranks = np.zeros((2, *x_RL.shape))
  for rank_RL, values_RL in zip(ranks, (x_RL, y_RL), strict=True):
    rank_N = scipy.stats.rankdata(values_RL[valid_RL])
    rank_RL[valid_RL] = rank_N - rank_N.mean()
  a_RL, b_RL = ranks
  # For each row: number of tokens, sums, and sums of products.
  terms = (valid_RL, a_RL, b_RL, a_RL**2, b_RL**2, a_RL * b_RL)
  sums_R6 = np.stack([x.sum(axis=1) for x in terms], axis=1)
  rng = np.random.default_rng(seed)
  rows = len(sums_R6)
  times_DR = rng.multinomial(rows, np.full(rows, 1 / rows), _DRAWS)
  # The first of the draws is the original sample.
  times_DR = np.vstack([np.ones(rows), times_DR])
  n, a, b, aa, bb, ab = (times_DR @ sums_R6).T
  with np.errstate(invalid='ignore', divide='ignore'):
    r = (ab - a * b / n) / np.sqrt((aa - a * a / n) * (bb - b * b / n))
  low, high = np.quantile(r[1:], (0.025, 0.975))
  return float(r[0]), float(low), float(high)


def _pieces(token_N, share_N, tokenizer) -> dict[str, float]:
  """Returns the mean share of each frequent piece of text, largest first.

  A token's share is the fraction of the routed blocks that process it.
  """
  tokens = np.unique(token_N)
  sums = collections.defaultdict(lambda: np.zeros(2))
  texts = tokenizer.pieces(tokens.tolist())
  # Several tokens may have the same text, such as parts of a character.
  for token, piece in zip(tokens, texts, strict=True):
    of_token_N = share_N[token_N == token]
    sums[piece] += len(of_token_N), of_token_N.sum()
  shares = {
    piece: float(total / count)
    for piece, (count, total) in sums.items()
    if count >= _OFTEN
  }
  return dict(sorted(shares.items(), key=lambda item: -item[1]))
