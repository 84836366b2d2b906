"""Studies of a vision model: its speed, and the importance of tokens."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mod_jax import flops, losses, timing, viz
from mod_jax.layers.token_info import in_order
from mod_jax.models import vit
from mod_jax.train.task import Study

_BATCHES = (1, 8, 32)
_ROUNDS = 9
_IMAGES = 16  # Images in which to measure the importance of tokens.


def throughput(task, params, model_state) -> Study:
  """Times the model and its dense twin alternately, for several batch sizes."""
  model = task.config.model
  configs = {'model': model, 'dense twin': model.dense_twin()}
  key = jax.random.key(0)
  # The time does not depend on the weights, so the twin's are random.
  variables = {
    'model': {'params': params, **model_state},
    'dense twin': nn.unbox(
      jax.jit(configs['dense twin'].build().init)(key, model.example())
    ),
  }
  ratio = flops.forward(model) / flops.forward(configs['dense twin'])
  titles = ['ms a batch', 'images/s', 'dense images/s', 'time ratio']
  titles.append('quartiles')
  lines = ['batch'.rjust(6) + ''.join(t.rjust(16) for t in titles)]
  metrics = {'flop_ratio': ratio, 'batches': {}}
  for batch in _BATCHES:
    size = model.image_size
    images_BHWC = jax.random.normal(key, (batch, size, size, 3))
    functions = {
      name: _inference(config, variables[name], images_BHWC, key)
      for name, config in configs.items()
    }
    seconds = timing.interleaved(functions, rounds=_ROUNDS)
    median = timing.medians(seconds)
    # The ratio of the medians in the table, not the median of the ratios.
    ratio_of_medians = median['model'] / median['dense twin']
    _, low, high = timing.ratio_spread(seconds, 'model', 'dense twin')
    metrics['batches'][str(batch)] = {
      'median_seconds': median,
      'ratio': ratio_of_medians,
      'quartiles': [low, high],
    }
    cells = (
      f'{1e3 * median["model"]:.2f}',
      f'{batch / median["model"]:.1f}',
      f'{batch / median["dense twin"]:.1f}',
      f'{ratio_of_medians:.3f}',
      f'{low:.3f}–{high:.3f}',
    )
    lines.append(f'{batch:6d}' + ''.join(c.rjust(16) for c in cells))
  lines.append(
    f'Medians of {_ROUNDS} rounds in turn on {jax.devices()[0].device_kind}.'
    ' Time ratio: of these medians; quartiles: of the ratios of the rounds.'
    f' FLOPs over the dense twin: {ratio:.3f}.'
  )
  return Study(text='\n'.join(lines), metrics=metrics)


def _inference(config, variables, images_BHWC, key):
  """Returns a function that runs the compiled model and waits for its end."""

  @jax.jit
  def logits(variables, images_BHWC, key):
    module = config.build()
    return module.apply(variables, images_BHWC, rngs={'routing': key}).logits_BV

  compiled = logits.lower(variables, images_BHWC, key).compile()
  return lambda: compiled(variables, images_BHWC, key).block_until_ready()


def importance(task, params, model_state) -> Study:
  """Correlates routing scores with the importance of tokens.

  The importance of a token to a routed layer is the rise of the image's loss
  when that layer processes all tokens but this one. It is measured in the dense
  model with the same weights, and correlated over tokens and images with the
  scores of the routed model (A-MoD, Gadhikar et al. 2024, section 4.4).
  """
  model = task.config.model
  batch = task.modality.examples(_IMAGES)
  layers = model.routed_blocks
  key = jax.random.key(task.config.seed)
  target_BV = jax.nn.one_hot(batch['label'], model.num_classes)

  @jax.jit
  def measure(params, model_state, images_BHWC, target_BV):
    def run(module):
      return [leave_one_out(module, i, images_BHWC, target_BV) for i in layers]

    variables = {'params': params, **model_state}
    output = model.build().apply(variables, images_BHWC, rngs={'routing': key})
    left_out = nn.apply(run, model.dense_twin().build())(variables)
    return list(
      zip(left_out, [r.score_BL for r in output.routing], strict=True)
    )

  pairs = jax.device_get(
    measure(params, model_state, batch['image'], target_BV)
  )
  rows = [f'{"block":>6}{"Pearson":>10}{"p":>10}{"Spearman":>10}{"p":>10}']
  correlations = []
  for layer, (importance_BL, score_BL) in zip(layers, pairs, strict=True):
    both = importance_BL.ravel(), score_BL.ravel()
    correlation = {}
    for name, test in (
      ('pearson', scipy.stats.pearsonr),
      ('spearman', scipy.stats.spearmanr),
    ):
      # Correlation with a constant is undefined.
      constant = any(np.ptp(x) == 0 for x in both)
      r, p = (np.nan, np.nan) if constant else test(*both)
      correlation |= {name: float(r), f'{name}_p': float(p)}
    correlations.append(correlation)
    rows.append(
      f'{layer:6d}' + ''.join(f'{x:10.3g}' for x in correlation.values())
    )
  rows.append(
    'Routing score against the rise of the dense loss without the token:'
    f' {len(batch["label"])} held-out images of {model.num_tokens} tokens.'
  )
  figure = viz.importance_scatter(
    np.stack([i.ravel() for i, _ in pairs]),
    np.stack([s.ravel() for _, s in pairs]),
    layers=layers,
    correlations=correlations,
    title='What the routed blocks choose by, and what matters',
  )
  return Study(
    text='\n'.join(rows),
    metrics=dict(zip(map(str, layers), correlations, strict=True)),
    figures={'scatter': figure},
  )


def leave_one_out(
  module: vit.ViT,
  layer: int,
  images_BHWC: jax.Array,
  target_BV: jax.Array,
) -> jax.Array:
  """Returns importance_BL, in nats, of each token to a layer of a dense model.

  `module` is bound to its variables; `target_BV` has one-hot classes.
  """
  x_BLD = module.embed(images_BHWC)
  for i in range(layer):
    x_BLD = module.step(i, x_BLD).x_BLD
  batch, length, _ = x_BLD.shape

  def loss(left_L):
    """Returns each image's loss when the layer processes only these tokens."""
    left_BL = jnp.broadcast_to(left_L, (batch, length))
    info = in_order(x_BLD).replace(valid_BL=left_BL)
    processed_BLD = module.step(layer, x_BLD, info=info).x_BLD
    y_BLD = jnp.where(left_BL[..., None], processed_BLD, x_BLD)
    for i in range(layer + 1, module.config.num_layers):
      y_BLD = module.step(i, y_BLD).x_BLD
    logits_BV, _ = module.classify(y_BLD)
    per_image = jax.vmap(
      lambda a, b: losses.classification_loss(a[None], b[None])[0]
    )
    return per_image(logits_BV, target_BV)

  # A loop over the tokens needs the memory of one pass only. It includes the
  # pass with all tokens, so that this is rounded in the same way.
  left_NL = jnp.concatenate(
    [jnp.ones((1, length), bool), ~jnp.eye(length, dtype=bool)]
  )
  loss_NB = jax.lax.map(loss, left_NL)
  return (loss_NB[1:] - loss_NB[0]).T
