"""A model with its weights, to be used: from a run of ours or a file."""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
from typing import Any

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.convert import beside, files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import vit as convert_vit
from mod_jax.data import images as images_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.models.lm import LMConfig
from mod_jax.tasks import make_task, warm_start
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.tasks.images import CLASSES
from mod_jax.train import evaluation
from mod_jax.train import workdir as workdir_lib

_LENGTH = 2048  # Tokens of a text of somebody else's model, unless it has less.
_BATCH = 32  # Pictures that are predicted at a time.
# What pictures had to become for most published models, where nothing tells.
_IMAGENET = {
  'mean': (0.485, 0.456, 0.406),
  'std': (0.229, 0.224, 0.225),
  'crop_fraction': 0.875,
}


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What a language model adds to a text.

  Attributes:
    text: the new part alone.
    log_probs: of its tokens, in nats, by the model's own distribution.
  """

  text: str
  log_probs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A model, its weights, and what turns pictures or texts into its input.

  Attributes:
    config: of the model.
    variables: of the model; `params`, and perhaps other collections.
    experiment: the run that trained it; None of a file of somebody else's.
    preprocess: of a vision model, turns pictures into its input, as in
      evaluation; None of a language model.
    classes: names of a vision model's classes, where they are known.
    task: of a run of ours, or of a language model; None otherwise.
    origin: directory of Hugging Face that a language model was loaded from, or
      None; it need not exist any more.
    foreign: whether a language model is, or was made from, somebody else's,
      without any training of ours: its prompts begin as its own texts do.
  """

  config: Any
  variables: Mapping[str, Any]
  experiment: ExperimentConfig | None = None
  preprocess: images_lib.Preprocess | None = None
  classes: tuple[str, ...] | None = None
  task: Any = None
  origin: str | None = None
  foreign: bool = False

  @functools.cached_property
  def model(self):
    """The linen module; `run.model.apply(run.variables, …)` is pure."""
    return self.config.build()

  @functools.cached_property
  def _jitted(self):
    return jax.jit(self.model.apply, static_argnames=('mode', 'mutable'))

  def apply(self, *args, **kwargs):
    """Returns the compiled model's output; arguments as of the module.

    Scores that are drawn need `rngs={'routing': key}`.
    """
    return self._jitted(self.variables, *args, **kwargs)

  @property
  def tokenizer(self):
    """The tokenizer of a language model's data; None where there is none."""
    if isinstance(self.config, LMConfig) and self.task is not None:
      return self.task.modality.tokenizer
    return None

  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text that the language model is to continue."""
    if self.foreign:
      return self.tokenizer.encode_prompt(text)
    return self.tokenizer.encode(text)

  def predict(self, inputs, **kwargs) -> list:
    """Returns what the model makes of pictures, or how it continues texts.

    Args:
      inputs: one, or a list: pictures are paths, Pillow images or arrays
        [height, width, 3] of bytes; texts are strings.
      **kwargs: `top`, of how many classes to tell the probability (5); or what
        `Language.continued` takes, such as num_tokens and temperature, which
        is 0 unless given.

    Returns:
      For each picture a dictionary from class names, the likeliest first, to
      probabilities; for each text a `Continuation`.

    Raises:
      UserError: an input is not what the model reads, or a setting is wrong.
    """
    single = not isinstance(inputs, Sequence) or isinstance(inputs, str)
    inputs = [inputs] if single else list(inputs)
    if not inputs:
      return []
    if self.preprocess is None:
      return self._continue(inputs, **kwargs)
    return self._classify(inputs, **kwargs)

  def evaluate(
    self,
    data: images_lib.ImageDataConfig | TextDataConfig | None = None,
    *,
    batches: int = 0,
  ) -> dict[str, float]:
    """Returns held-out metrics, such as `loss` and `accuracy`.

    A routed language model has them for each rule, as in `top_k/loss`.

    Args:
      data: what to evaluate on, for which the model's own preprocessing or
        tokenizer is taken; None for what the run was trained on.
      batches: how many; 0 for all that is held out.

    Raises:
      UserError: nobody says on what, or the data cannot be read or do not fit.
    """
    task = self.task
    if data is not None:
      task = self._task_on(data)
    elif task is None or self.foreign:
      example = 'ImageDataConfig(source="folder", path="photos")'
      if isinstance(self.config, LMConfig):
        example = 'TextDataConfig(source="files", files="texts/*.txt")'
      raise UserError(
        'evaluate: this model is not from a run of ours, so it has no data: say'
        f' on which, as in data={example}.'
      )
    task.check()
    mesh = parallel.make_mesh(parallel.MeshConfig())
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = dict(jax.device_put(dict(self.variables), everywhere))
    params = state.pop('params')
    with jax.set_mesh(mesh):
      return evaluation.held_out(task, params, state, mesh, batches=batches)

  def _task_on(self, data):
    """Returns a task that reads other data as the model wants them."""
    if self.preprocess is not None:
      data = self.preprocess.apply_to(data)
    elif self.task is not None and data.source != 'prepared':
      kind, path = self.task.modality.tokenizer_source
      data = dataclasses.replace(data, tokenizer=kind, tokenizer_path=path)
    return make_task(ExperimentConfig(model=self.config, data=data))

  def _continue(self, texts, **kwargs):
    if wrong := [text for text in texts if not isinstance(text, str)]:
      raise UserError(
        f'{wrong[0]!r} is a {type(wrong[0]).__name__}, and a language model'
        ' continues texts: give strings.'
      )
    state = dict(self.variables)
    params = state.pop('params')
    kwargs.setdefault('temperature', 0.0)
    language = self.task.modality
    prompts = [self.encode(text) for text in texts]
    generated = language.continued(params, state, prompts, **kwargs)
    return [
      Continuation(text, np.asarray(log_prob_N[:length]))
      for text, log_prob_N, length in zip(
        language.decoded(prompts, generated),
        generated.log_prob_BN,
        generated.length_B,
        strict=True,
      )
    ]

  def _classify(self, pictures, **kwargs):
    found = []
    for some in itertools.batched(pictures, _BATCH):
      found += self.classify(self.preprocess(some), **kwargs)
    return found

  def classify(self, images_BHWC, *, top: int = 5) -> list[dict[str, float]]:
    """Returns what `predict` does, of pictures that `preprocess` made."""
    if top < 1:
      raise UserError(f'top={top}: expected at least 1.')
    names = self.classes or tuple(map(str, range(self._num_classes)))
    # ImageNet has two kinds of crane.
    shared = {name for name, n in collections.Counter(names).items() if n > 1}
    names = [f'{x} ({v})' if x in shared else x for v, x in enumerate(names)]
    rngs = {'routing': jax.random.key(0)}
    logits_BV = self.apply(images_BHWC, rngs=rngs).logits_BV
    probability_BV = jax.nn.softmax(logits_BV.astype(jnp.float32))
    found = []
    for probability_V in np.asarray(probability_BV):
      best = np.argsort(-probability_V, kind='stable')[:top]
      found.append({names[v]: float(probability_V[v]) for v in best})
    return found

  @property
  def _num_classes(self) -> int:
    return self.config.dense_twin().num_classes


def load(path: str | os.PathLike, *, trust: Sequence[str] = (), **known) -> Run:
  """Returns a model with its weights.

  No code that lies in a folder is run: a config may name classes of mod_jax and
  of modules that are imported already, and all others are refused.

  Args:
    path: directory of a run of ours, of which the newest checkpoint is read;
      a folder that `export` wrote; a folder of Hugging Face with a language
      model of a kind in `convert.lm.FAMILIES`; or a vision transformer of
      somebody else's: a folder from Hugging Face or timm, or a file as
      `convert.vit.load` reads it.
    trust: modules to import before, such as `['package.module']`, of which the
      config may name classes.
    **known: of such a file, fields of `ViTConfig` that it does not tell, as
      `convert.vit.derive` takes them.

  Raises:
    UserError: there is nothing at that path, or it holds no model.
  """
  config_lib.trust(trust)
  fields = about(path, **known)
  config = fields['config']
  if not warm_start.is_ours(path) and isinstance(config, LMConfig):
    return Run(variables={'params': convert_lm.load(path, config)}, **fields)
  if not warm_start.is_ours(path):
    variables = convert_vit.load_variables(files.find(path), config)
    return Run(variables=variables, **fields)
  shapes = _shapes(config)
  params, model_state = warm_start.from_ours(
    shapes.pop('params'), shapes, os.fspath(path)
  )
  variables = jax.tree.map(jnp.asarray, {'params': params, **model_state})
  return Run(variables=variables, **fields)


def about(path: str | os.PathLike, **known) -> dict[str, Any]:
  """Returns the fields of the `Run` that `load` would return, but no weights.

  Arguments, but for `trust`, and errors are those of `load`.
  """
  ours, language = warm_start.is_ours(path), convert_lm.holds_model(path)
  if not ours and not language:
    return _of_file(files.find(path), known)
  if known:
    raise UserError(
      f'{next(iter(known))}: {path} is a model whose config is known; leave it'
      ' out.'
    )
  if not ours:
    return _of_language(path)
  told = _of_workdir if warm_start.is_workdir(path) else _of_folder
  return {'config': warm_start.model_config(path), **told(path)}


def _of_folder(path) -> dict[str, Any]:
  """Returns what is known of a model that `export` wrote in our own format."""
  told, pictures = warm_start.read_folder(path)
  task = preprocess = None
  if told.experiment is not None:
    task = make_task(told.experiment)
  if told.tokenizer is not None:
    task.modality.use_tokenizer(told.tokenizer, os.fspath(path))
  else:
    preprocess = _preprocess(pictures, f'{path}/{warm_start.FOLDER}')
  return {
    'experiment': told.experiment,
    'preprocess': preprocess,
    'classes': told.classes,
    'task': task,
    'foreign': told.foreign,
  }


def _preprocess(fields, where) -> images_lib.Preprocess:
  """Returns what turns pictures into input, from its own fields."""
  try:
    resample = Image.Resampling(fields.get('resample'))
  except ValueError as error:
    raise UserError(f'{where}: preprocess.resample: {error}.') from error
  fields = {k: fields[k] for k in fields if k != 'resample'}
  # A config of data has all the others, and their types.
  data = config_lib.from_known(
    images_lib.ImageDataConfig, fields, f'{where}: preprocess'
  )
  return dataclasses.replace(data.preprocess, resample=resample)


def _shapes(config) -> dict[str, Any]:
  """Returns the shapes of a model's variables, by collection."""
  key = jax.random.key(0)
  rngs = {'params': key, 'routing': key}
  init = config.build().init
  return dict(nn.unbox(jax.eval_shape(lambda: init(rngs, config.example()))))


def _of_workdir(path) -> dict[str, Any]:
  """Returns what is known of the model of a run."""
  experiment = workdir_lib.read_config(path, ExperimentConfig)
  found = {'experiment': experiment, 'task': make_task(experiment, path)}
  if isinstance(experiment.model, LMConfig):
    return found
  kept = workdir_lib.expand(path) / CLASSES
  if kept.is_file():
    names = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
      names = json.loads(kept.read_text(encoding='utf-8'))
    if not isinstance(names, list) or any(type(n) is not str for n in names):
      raise UserError(f'{kept} is no list of names: delete or restore it.')
    found['classes'] = tuple(names)
  return found | {'preprocess': experiment.data.preprocess}


def _of_language(path) -> dict[str, Any]:
  """Returns what is known of a language model of Hugging Face."""
  config = convert_lm.derive(path)
  # Its text is unknown; the rest of an experiment tells how to read it.
  data = TextDataConfig(
    tokenizer='huggingface',
    tokenizer_path=os.fspath(path),
    length=min(convert_lm.max_length(path), _LENGTH),
  )
  experiment = ExperimentConfig(model=config, data=data, init=os.fspath(path))
  return {
    'config': config,
    'experiment': experiment,
    'task': make_task(experiment),
    'origin': os.fspath(path),
    'foreign': True,
  }


def _of_file(file, known) -> dict[str, Any]:
  """Returns what is known of a model of somebody else's."""
  config = convert_vit.derive(file, **known)
  told = beside.read(file)
  classes = told.classes
  if classes is not None and len(classes) != config.dense_twin().num_classes:
    classes = None
  assumed = {k: v for k, v in _IMAGENET.items() if k not in told.pictures}
  if assumed:
    logging.warning(
      'Assumed for pictures, as is usual with ImageNet, since nothing beside %s'
      ' tells: %s; if the model was trained with others, see `run.preprocess`.',
      *(file, ', '.join(f'{name}={value}' for name, value in assumed.items())),
    )
  size, unfollowed = config.dense_twin().image_size, [*told.unfollowed]
  if told.image_size not in (None, size):
    unfollowed.append(
      f'pictures of {told.image_size} pixels a side, where the model has {size}'
    )
  preprocess = images_lib.Preprocess(image_size=size, **told.pictures | assumed)
  if unfollowed:
    logging.warning(
      'Of the preprocessing that is told beside %s, this is not followed: %s;'
      ' pictures are read by %s.',
      *(file, '; '.join(unfollowed), preprocess),
    )
  return {
    'config': config,
    'preprocess': preprocess,
    'classes': classes,
  }
