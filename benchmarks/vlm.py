"""Answers about pictures at LLaVA's shape scaled down, against the dense one.

    python benchmarks/vlm.py --torch=python3.11

Every prompt is a picture of 576 tokens and a question. Times, in turn, the
whole prompt with its picture up to the first new token, and steps of one token
of every row after it: of the dense model, of p-MoD, γ-MoD and FastV, of a dense
model that reads means of 2 × 2 patches, and, if `--torch` names a Python that
has torch and transformers, of PyTorch's `LlavaForConditionalGeneration` with
the dense model's weights, which must write the same tokens. FLOPs are those of
the prompt, with one row of the head. Bytes are those of keys and values;
`llava_cache_share` is that of the image tokens alone in LLaVA's 32 layers. The
result is written beside this file as JSON.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile

from absl import app, flags
import child
import jax
import jax.numpy as jnp
import machine
import numpy as np

from mod_jax import config as config_lib
from mod_jax import timing, trees
from mod_jax.convert import llava
from mod_jax.models import lm, protocol, vlm
from mod_jax.sampling import generation
import results as results_lib

_LAYERS = flags.DEFINE_integer('layers', 16, 'Blocks of the language model.')
_WIDTH = flags.DEFINE_integer('width', 384, 'Its width.')
_TEXT = flags.DEFINE_integer('text', 64, 'Tokens of a question.')
_BATCHES = flags.DEFINE_list('batches', [4, 16, 1], 'Rows.')
_PROMPTS = flags.DEFINE_list(
  'prompts', [5, 3, 8], 'Timed prompts of each, by batch.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed steps of each.')
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and transformers; None goes without.'
)
_WARMUP = 2
_CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'vlm' / 'llava.py'


def shaped(whole: vlm.VLMConfig) -> vlm.VLMConfig:
  """Returns LLaVA's model scaled to this depth and width.

  Heads keep their 64 channels in the tower, and have as many in the language
  model. Ratios of widths and depths are LLaVA's, but for a tower of less than
  two heads.
  """
  width, layers = _WIDTH.value, _LAYERS.value
  seen = max(128, width // 4)
  return dataclasses.replace(
    whole,
    tower=dataclasses.replace(
      whole.tower,
      num_layers=layers * 3 // 4,
      width=seen,
      num_heads=seen // 64,
      dtype='float32',
    ),
    language=dataclasses.replace(
      whole.language,
      vocab_size=2048,
      num_layers=layers,
      width=width,
      num_heads=width // 64,
      mlp_dim=width * 43 // 16,
      dtype='float32',
      remat='none',
    ),
    image_token=2047,
  )


def variants() -> dict[str, vlm.VLMConfig]:
  """Returns the models that are compared, by name."""
  config = config_lib.load(_CONFIG)
  dense = shaped(config.MODEL)
  layers = vlm.gamma_layers(_LAYERS.value)
  return {
    'dense': dense,
    'pmod': dense.with_parts(routing=config.ROUTING['pmod']),
    'gamma': dense.with_parts(
      routing=dataclasses.replace(config.ROUTING['gamma'], layers=layers)
    ),
    'fastv': dense.with_parts(routing=config.SCENES.FASTV),
    'pooled': dataclasses.replace(dense, pooling=2),
  }


def drawn(config) -> dict:
  """Returns variables that say something to each other, routers included."""
  rng = np.random.default_rng(0)

  def draw(name, leaf):
    scale = leaf.shape[0] ** -0.5 if 'kernel' in name else 0.02
    if 'out/kernel' in name:
      scale = np.prod(leaf.shape[:-1]) ** -0.5
    value = rng.normal(0, scale, leaf.shape) + ('scale' in name)
    return jnp.asarray(value, leaf.dtype)

  shapes = dict(protocol.shapes(config))
  params = trees.flatten(shapes.pop('params'))
  # The dense parameters first, so that they are the same in all.
  names = sorted(params, key=lambda name: ('router' in name, name))
  params = trees.unflatten({name: draw(name, params[name]) for name in names})
  # Statistics of batch norms: any positive numbers will do.
  statistics = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
  return {'params': params, **statistics}


def prompts(config: vlm.VLMConfig, batch: int, text: int):
  """Returns tokens and pictures of rows, all different."""
  rng = np.random.default_rng(1)
  text_BT = rng.integers(0, config.image_token, (batch, text))
  size = config.image_size
  images = rng.normal(size=(batch, 1, size, size, 3)).astype(np.float32)
  rows = [[config.image_token, *row] for row in text_BT.tolist()]
  return vlm.place_images(config, rows, list(images))


def prefill_flops(config: vlm.VLMConfig, text: int) -> int:
  """Returns the FLOPs of a prompt of one row, with one row of the head."""
  *parts, _ = config.flops_table(config.num_patches + text, 1)
  head = 2 * config.language.width * config.vocab_size
  return sum(sum(part.values()) for _, part in parts) + head


def cache_bytes(cache: lm.LMCache) -> int:
  return sum(
    array.size * array.dtype.itemsize
    for block in cache.blocks
    for array in (block.key_BGSC, block.value_BGSC)
  )


class Model:
  """A model with its weights, and the state after the newest prompt."""

  def __init__(self, config: vlm.VLMConfig, batch: int, text: int):
    room = config.num_patches + text + _WARMUP + _ROUNDS.value
    self.config, self.mode = config, config.decoding_mode
    self.variables = drawn(config)
    self.placed = prompts(config, batch, text)
    self.empty = functools.partial(
      lm.LMCache.empty,
      *(config, batch, room, self.mode, None, config.num_patches),
    )
    self.bytes = cache_bytes(jax.eval_shape(self.empty))
    self.cache = self.token_B = None

  @functools.cached_property
  def _prefill(self):
    model = self.config.build()

    @jax.jit
    def prefill(variables, tokens_BL, images_BIHWC):
      logits_B1V, cache, _ = generation.read(
        *(model, variables, tokens_BL, None, self.empty(), self.mode),
        jax.random.key(0),
        images_BIHWC=images_BIHWC,
        prompt=True,
      )
      return cache, logits_B1V[:, 0].argmax(axis=-1)

    return prefill

  @functools.cached_property
  def _step(self):
    model = self.config.build()

    @functools.partial(jax.jit, donate_argnums=1)
    def step(variables, cache, token_B):
      logits_B1V, cache, _ = generation.read(
        *(model, variables, token_B[:, None], None, cache, self.mode),
        jax.random.key(0),
      )
      return cache, logits_B1V[:, 0].argmax(axis=-1)

    return step

  def prefill(self):
    (tokens_BL, images_BIHWC), _ = self.placed.inputs
    self.cache, self.token_B = self._prefill(
      self.variables, tokens_BL, images_BIHWC
    )
    self.token_B.block_until_ready()

  def step(self):
    self.cache, self.token_B = self._step(
      self.variables, self.cache, self.token_B
    )
    self.token_B.block_until_ready()


def measure(
  configs: dict[str, vlm.VLMConfig],
  batch: int,
  text: int,
  rounds: int,
  stack: contextlib.ExitStack,
) -> tuple[dict, str | None]:
  """Returns the figures for a number of rows, and PyTorch's description.

  Args:
    configs: the models by name; one is `dense`.
    batch: rows of a prompt.
    text: tokens of a question.
    rounds: timed prompts of each model.
    stack: closes PyTorch's process.
  """
  about = None
  models = {name: Model(x, batch, text) for name, x in configs.items()}
  prefills = {name: model.prefill for name, model in models.items()}
  steps = {name: model.step for name, model in models.items()}
  tokens = []
  if _TORCH.value:
    dense = models['dense']
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    llava.save(folder, dense.variables['params'], dense.config)
    np.savez(
      pathlib.Path(folder, 'inputs.npz'),
      tokens=dense.placed.tokens_BL,
      images=dense.placed.images_BIHWC,
    )
    run, about = stack.enter_context(
      child.steps(_TORCH.value, 'torch_vlm.py', folder)
    )
    for called, name in ((prefills, 'prefill'), (steps, 'step')):
      called['torch'] = lambda name=name: tokens.append(json.loads(run(name)))
  of_prompts = timing.interleaved(prefills, rounds=rounds)
  first = models['dense'].token_B.tolist()
  of_steps = timing.interleaved(steps, rounds=_ROUNDS.value, warmup=_WARMUP)
  last = models['dense'].token_B.tolist()
  work = {name: prefill_flops(x, text) for name, x in configs.items()}
  sizes = {name: model.bytes for name, model in models.items()}
  cell = {
    'batch': batch,
    'seconds_to_first_token': timing.medians(of_prompts),
    'seconds_per_step': timing.medians(of_steps),
    'flops': work,
    'cache_bytes': sizes,
    'prompt': results_lib.over_dense(of_prompts, work),
    'step': {
      name: timing.ratio_spread(of_steps, name, 'dense')
      for name in configs
      if name != 'dense'
    },
  }
  if tokens:
    cell['dense_over_torch'] = {
      'prompt': timing.ratio_spread(of_prompts, 'dense', 'torch'),
      'step': timing.ratio_spread(of_steps, 'dense', 'torch'),
    }
    cell['same_first_tokens'] = first == tokens[rounds]
    cell['same_last_tokens'] = last == tokens[-1]
  return cell, about


def llava_cache_share() -> dict[str, float]:
  """Returns what image tokens take of the dense cache in LLaVA's 32 layers."""
  config = config_lib.load(_CONFIG)

  def size(routing):
    model = config.MODEL.with_parts(routing=routing)
    places = model.num_patches
    cache = jax.eval_shape(
      lambda: lm.LMCache.empty(
        model, 1, places, model.decoding_mode, image_places=places
      )
    )
    return cache_bytes(cache)

  whole = size(None)
  return {
    name: size(routing) / whole
    for name, routing in config.ROUTING.items()
    if routing is not None
  }


def main(_):
  machine.with_malloc(machine.KEPT)
  results = {
    **results_lib.settings('layers', 'width', 'text', 'rounds'),
    'llava_cache_share': llava_cache_share(),
    'cells': [],
  }
  for batch, rounds in zip(_BATCHES.value, _PROMPTS.value, strict=False):
    with contextlib.ExitStack() as stack:
      cell, results['torch'] = measure(
        *(variants(), int(batch), _TEXT.value, int(rounds), stack)
      )
    results['cells'].append(cell)
    results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
