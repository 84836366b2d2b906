"""Finds out what a path contains: a run, an export or a pretrained model.

To add a format, write a subclass of `Source` and a branch in `Source.open`; for
folders of Hugging Face, a subclass of `_Published` and a line in `_PUBLISHED`.

Importing this module first runs `tasks/__init__.py`, since `ExperimentConfig`
is in `tasks`. The other modules of `tasks` then find this one incomplete. Hence
they import it as a whole, and no names from it.
"""

import abc
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, ClassVar, Literal

from absl import logging
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import paths, trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import beside, files, gguf
from mod_jax.convert import clip as convert_clip
from mod_jax.convert import detr as convert_detr
from mod_jax.convert import llava as convert_llava
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import peft as convert_peft
from mod_jax.convert import vit as convert_vit
from mod_jax.convert import wav2vec2 as convert_wav2vec2
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.characters import VOCABULARY
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.detection import DetectionDataConfig, DetectionPreprocess
from mod_jax.data.images import ImageDataConfig, Preprocess
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError, require
from mod_jax.models.detr import DETRConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import best as best_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import restore_named
from mod_jax.tasks.experiment import ExperimentConfig, ModelConfig

# The files of a folder that `mod_jax.export` writes in our own format.
FOLDER, WEIGHTS = 'mod_jax.json', 'model.safetensors'
CLASSES = 'classes.json'  # The class names in a run's directory.
# Preprocessing of most published models. It is assumed for weights if no file
# beside them has these values.
_IMAGENET = {
  'mean': (0.485, 0.456, 0.406),
  'std': (0.229, 0.224, 0.225),
  'crop_fraction': 0.875,
}
# Preprocessing of CLIP (Radford et al. 2021), for weights without metadata.
_CLIP = {
  'mean': (0.48145466, 0.4578275, 0.40821073),
  'std': (0.26862954, 0.26130258, 0.27577711),
  'crop_fraction': 1.0,
  'resample': Image.Resampling.BICUBIC,
}


class Source(abc.ABC):
  """A model at a path; `Source.open` returns an instance of a subclass.

  Most files are read when an attribute is first used.

  Attributes:
    path: the directory, or the file of a pretrained vision model's weights.
    kind: `run` and `export` of mod_jax; `language`, a folder of Hugging Face or
      a GGUF file; `vision`, weights in any `convert.vit.Naming`, or a CLIP
      tower; `peft`, adapters of PEFT; `vlm`, a LLaVA; `detector`, a DETR;
      `speech`, a Wav2Vec2.
    tokenizer: kind of the tokenizer in an exported folder; None otherwise.
    base, config, experiment, preprocess, classes, multi_label, foreign: as in
      `load.Run`.
  """

  kind: ClassVar[
    Literal[
      *('run', 'export', 'language', 'vision', 'peft', 'detector', 'speech'),
      'vlm',
    ]
  ]
  base: str | None = None
  config: ModelConfig
  experiment: ExperimentConfig | None = None
  preprocess: Preprocess | DetectionPreprocess | None = None
  classes: tuple[str, ...] | None = None
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] | None = None
  foreign: bool = False

  def __init__(self, path):
    self.path = path

  @staticmethod
  def open(
    path: str | os.PathLike, *, base: str | None = None, **fields
  ) -> 'Source':
    """Returns the source for a path.

    Reads no weights, except adapters of PEFT and a vision transformer that they
    belong to. Writes a GGUF file's config and tokenizer to a cache directory.

    Args:
      path: path of a run, an export, a folder of Hugging Face, timm or PEFT, or
        a file.
      base: as for `load.load`.
      **fields: fields of the config of a pretrained vision model that its file
        may lack; see `convert.vit.derive`.

    Raises:
      UserError: there is nothing at that path, or no model.
    """
    folder = paths.expand(path)
    if workdir_lib.holds_run(folder):
      source = _Run(folder)
    elif convert_peft.holds_adapters(folder):
      source = _Peft(folder, base)
    elif (folder / FOLDER).is_file():
      source = _Export(folder)
    elif gguf.is_gguf(folder):
      source = _Gguf(folder)
    elif (published := _published(folder)) is not None:
      source = published(folder)
    else:
      source, fields = _Vision(files.find(path), fields), {}
    if fields:
      raise UserError(
        f'{next(iter(fields))}: {path} is a model whose config is known; leave'
        ' it out.'
      )
    if base is not None:
      if source.base is None:
        raise UserError(
          f'base={base}: {path} holds all of its weights itself; leave it out.'
        )
      source.base = base
    return source

  @staticmethod
  def of_init(init: str, base: str | None = None) -> 'Source':
    """Like `open`, for the field `init` of an `ExperimentConfig`."""
    return Source.open(workdir_lib.find(init), base=base)

  @property
  def ours(self) -> bool:
    """Whether the path is of a run, an export or PEFT adapters."""
    return self.kind in ('run', 'export', 'peft')

  @functools.cached_property
  def multi_label(self) -> bool:
    data = self.experiment and self.experiment.data
    return isinstance(data, ImageDataConfig) and data.multi_label

  @abc.abstractmethod
  def read(self) -> dict[str, Any]:
    """Returns the variables by collection, some as `files.Lazy` arrays.

    Parameters that a run has frozen, and that are at `base`, are left out.
    """

  def read_for(
    self, model: ModelConfig, *, truncate: bool = False
  ) -> dict[str, Any]:
    """Like `read`, of a published model, for a `model` of the same kind.

    Parameters are arranged like those of `model`. Those that the files lack are
    left out, and with `truncate` those of blocks that `model` does not have.
    """
    return self.read()

  def at(self, step: best_lib.Step) -> 'Source':
    """Makes `read` restore a run's checkpoint of this step; returns self.

    None is the newest. Raises UserError for a step of anything but a run.
    """
    if step is not None:
      raise UserError(
        f'step={step!r}: {self.path} is no run with checkpoints; leave it out.'
      )
    return self


class _Run(Source):
  """A directory in which mod_jax has trained a model.

  Attributes:
    checkpoint: the checkpoint that `read` has restored, without its arrays;
      None until `read` is called.
  """

  kind = 'run'
  checkpoint = None
  _step: int | None = None

  @functools.cached_property
  def base(self):
    frozen = self.experiment.train.frozen is not None
    return self.experiment.init if frozen else None

  def at(self, step):
    self._step = best_lib.resolve(self.path, step)
    return self

  @functools.cached_property
  def experiment(self):
    return workdir_lib.read_config(self.path, ExperimentConfig)

  @property
  def config(self):
    return self.experiment.model

  @property
  def preprocess(self):
    data = self.experiment.data
    sees = isinstance(
      data, ImageDataConfig | DetectionDataConfig | ConversationDataConfig
    )
    return data.preprocess if sees else None

  @property
  def classes(self):
    file = self.path / CLASSES
    if self.preprocess is None or not file.is_file():
      return None
    names = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
      names = json.loads(file.read_text(encoding='utf-8'))
    if not isinstance(names, list) or any(type(n) is not str for n in names):
      raise UserError(f'{file} is no list of names: delete or restore it.')
    return tuple(names)

  def read(self):
    """Returns the variables of one checkpoint, for evaluation.

    The parameters are moving averages, if the run keeps any. No file is
    written, since the run may still be training.
    """
    params = 'ema' if self.experiment.train.ema_decay else 'params'
    restored = restore_named(
      workdir_lib.checkpoints(self.path),
      (params, 'model_state'),
      step=self._step,
      check=functools.partial(
        origin_lib.check_config, self.path, self.experiment
      ),
    )
    if restored is None:
      raise UserError(
        f'{self.path} holds no checkpoint yet, so there are no weights to start'
        ' from: train it for longer.'
      )
    self.checkpoint = dataclasses.replace(restored, state=None)
    for name, array in trees.by_path(restored.state).items():
      files.check_finite(array, self.path, name)
    return {'params': restored.state[params], **restored.state['model_state']}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """Fields of an export's JSON file `FOLDER`, all but `preprocess`."""

  model: ModelConfig
  experiment: ExperimentConfig | None = None
  classes: tuple[str, ...] | None = None
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] | None = None
  foreign: bool = False
  multi_label: bool = False


class _Export(Source):
  kind = 'export'

  def __init__(self, path):
    super().__init__(path)
    file = path / FOLDER
    fields = paths.read_object(file)
    experiment, pictures = fields.get('experiment'), fields.get('preprocess')
    if isinstance(experiment, dict):
      experiment = {k: experiment[k] for k in experiment if k != 'type'}
    known = config_lib.from_known(
      _Fields, fields | {'experiment': experiment}, file
    )
    self.config, self.experiment = known.model, known.experiment
    self.classes, self.tokenizer = known.classes, known.tokenizer
    self.foreign, self.multi_label = known.foreign, known.multi_label
    language = isinstance(known.model, LMConfig)
    sees = not isinstance(known.model, LMConfig | Wav2Vec2Config)
    if (
      (experiment is not None and known.experiment.model != known.model)
      or (language and (experiment is None or known.tokenizer is None))
      or (sees and not isinstance(pictures, dict))
    ):
      raise UserError(
        f'{file}: its parts do not fit each other: export the model again.'
      )
    if not sees:
      return
    where = f'{file}: preprocess'
    # Data configs have the fields of the preprocessing, and check their types.
    if isinstance(known.model, DETRConfig):
      fields = pictures | {'source': 'coco', 'path': os.fspath(path)}
      data = config_lib.from_known(DetectionDataConfig, fields, where)
      self.preprocess = data.preprocess
      return
    try:
      resample = Image.Resampling(pictures.pop('resample', None))
    except ValueError as error:
      raise UserError(f'{where}.resample: {error}.') from error
    data = config_lib.from_known(ImageDataConfig, pictures, where)
    self.preprocess = dataclasses.replace(data.preprocess, resample=resample)

  def read(self):
    return trees.unflatten(files.stored(self.path))


class _Peft(Source):
  """Adapters of PEFT, together with the model that they belong to."""

  kind = 'peft'

  def __init__(self, path, base):
    super().__init__(path)
    self.base = base or convert_peft.base_of(path)
    whole = Source.open(self.base)
    if whole.kind not in ('language', 'vision'):
      raise UserError(
        f'{path} holds adapters of a model of Hugging Face, and {self.base} is'
        ' none: give the folder of one as base.'
      )
    self._whole = whole
    self.config = convert_peft.derive(path, whole.config)
    self.preprocess, self.foreign = whole.preprocess, whole.foreign
    self.multi_label = whole.multi_label
    if getattr(self.config, 'num_classes', 0) == len(whole.classes or ()):
      self.classes = whole.classes
    if whole.experiment is not None:
      self.experiment = dataclasses.replace(
        whole.experiment, model=self.config, init=os.fspath(path)
      )

  def read(self):
    variables = self._whole.read()
    adapters = convert_peft.read(self.path, self.config)
    params = trees.join(variables['params'], trees.unflatten(adapters))
    return variables | {'params': params}


class _Published(Source):
  """A published model, read by `format`, a module such as `convert.lm`."""

  format: ClassVar[Any]

  @functools.cached_property
  def config(self):
    return self.format.derive(self.path)

  def read(self):
    weights = self.format.read(self.path, self.config)
    return arrays_lib.complete(weights, self.config)

  def _reads(self, data):
    """Returns an `experiment` that only says how the model reads `data`."""
    path = os.fspath(self.path)
    return ExperimentConfig(model=self.config, data=data, init=path)


class _Language(_Published):
  kind = 'language'
  format = convert_lm
  foreign = True

  @functools.cached_property
  def experiment(self):
    path = os.fspath(self.path)
    if unfollowed := convert_lm.unfollowed(path):
      logging.warning(
        'Of the settings of generation in %s, this is not followed: %s.',
        *(path, '; '.join(unfollowed)),
      )
    # SentencePiece's tokenizers are read only from folders that `export` wrote:
    # in others, no file says whether texts start with a begin token.
    settings = paths.read_object(self.path / 'tokenizer_config.json')
    exported = settings.get('tokenizer_class') == 'PreTrainedTokenizerFast'
    pieces = exported and not (self.path / 'tokenizer.json').exists()
    return self._reads(
      TextDataConfig(
        tokenizer='sentencepiece' if pieces else 'huggingface',
        tokenizer_path=path,
        length=convert_lm.max_length(path),
      )
    )

  def read(self):
    return self.read_for(self.config)

  def read_for(self, model, *, truncate=False):
    params = convert_lm.read(self.path, model, self._stored())
    return {'params': trees.unflatten(params)}

  def _stored(self) -> dict[str, files.Lazy]:
    return files.stored(self.path)


class _Gguf(_Language):
  """Source of the weights in a GGUF file.

  `path` is the directory of the config and tokenizer unpacked from that file.
  """

  def __init__(self, file):
    super().__init__(gguf.unpack(file))
    self._file = file

  def _stored(self):
    return gguf.stored(self._file)


class _Speech(_Published):
  kind = 'speech'
  format = convert_wav2vec2
  foreign = True

  @functools.cached_property
  def experiment(self):
    path = os.fspath(self.path)
    told = beside.of_processor(self.path, 'feature_extractor')
    normalizes = told.get('do_normalize', True)
    with config_lib.inside(f'the preprocessing beside {path}'):
      require(
        normalizes is True, 'true, as here always', do_normalize=normalizes
      )
      data = AudioDataConfig(
        source='folder',
        path=path,
        vocabulary=os.path.join(path, VOCABULARY),
        rate=told.get('sampling_rate', AudioDataConfig.rate),
      )
    return self._reads(data)

  def read_for(self, model, *, truncate=False):
    weights = convert_wav2vec2.read(self.path, model.dense_twin())
    return {'params': trees.unflatten(weights)}


class _Pictures(_Published):
  """A published model of images; files beside it may tell the preprocessing.

  Attributes:
    usual: name of a kind of models, for messages, and the fields of
      `Preprocess` that are assumed where no file tells them.
  """

  usual = 'ImageNet', _IMAGENET

  @functools.cached_property
  def _metadata(self):
    return beside.read(self.path)

  @property
  def _size(self) -> int:
    """Height and width of the model's input in pixels."""
    return self.config.dense_twin().image_size

  @functools.cached_property
  def preprocess(self):
    metadata, size = self._metadata, self._size
    others, usual = self.usual
    assumed = {k: x for k, x in usual.items() if k not in metadata.pictures}
    if assumed:
      logging.warning(
        'Assumed for pictures, as is usual with %s, since nothing beside'
        ' %s tells: %s; if the model was trained with others, see'
        ' `run.preprocess`.',
        *(others, self.path),
        ', '.join(f'{k}={x}' for k, x in assumed.items()),
      )
    unfollowed = [*metadata.unfollowed]
    if metadata.image_size not in (None, size):
      unfollowed.append(
        f'pictures of {metadata.image_size} pixels a side, where the model has'
        f' {size}'
      )
    preprocess = Preprocess(image_size=size, **metadata.pictures | assumed)
    with config_lib.inside(f'the preprocessing beside {self.path}'):
      # `ImageDataConfig` checks the ranges of the fields.
      preprocess.apply_to(ImageDataConfig())
    if unfollowed:
      logging.warning(
        'Of the preprocessing that is told beside %s, this is not followed: %s;'
        ' pictures are read by %s.',
        *(self.path, '; '.join(unfollowed), preprocess),
      )
    return preprocess


class _Vision(_Pictures):
  kind = 'vision'

  def __init__(self, path, fields):
    super().__init__(path)
    self._fields = fields

  @functools.cached_property
  def config(self):
    return convert_vit.derive(self.path, **self._fields)

  @property
  def multi_label(self):
    # As in transformers, a single logit is that of an independent label.
    single = self.config.dense_twin().num_classes == 1
    return single or self._metadata.multi_label

  @property
  def classes(self):
    names = self._metadata.classes
    count = self.config.dense_twin().num_classes
    return names if names is None or len(names) == count else None

  def read(self):
    return convert_vit.load_variables(self.path, self.config)

  def read_for(self, model, *, truncate=False):
    # Files hold the dense model, and maybe the prediction heads of DynamicViT.
    model = model.with_parts(routing=None, adaptive=None, lora=None)
    weights = convert_vit.read(self.path, model, truncate=truncate)
    return arrays_lib.unflatten(weights)


class _OfCLIP(_Pictures):
  """A folder of Hugging Face that contains CLIP's vision tower."""

  usual = 'CLIP', _CLIP

  @functools.cached_property
  def _metadata(self):
    return beside.read(self.path / 'config.json')

  def read(self):
    # Unlike the base class, do not call `complete`: no parameter is missing,
    # and `complete` would read all arrays of a large LLaVA at once.
    params = self.format.read(self.path, self.config)
    return {'params': trees.unflatten(params)}


class _Tower(_OfCLIP):
  """A published CLIP, of which only the vision tower is read."""

  kind = 'vision'
  format = convert_clip


class _VisionLanguage(_OfCLIP):
  kind = 'vlm'
  format = convert_llava
  foreign = True

  @property
  def _size(self):
    return self.config.image_size

  @functools.cached_property
  def experiment(self):
    path = os.fspath(self.path)
    if not (self.path / 'tokenizer.json').is_file():
      return None  # The model can read tokens, but no text.
    data = ConversationDataConfig(
      tokenizer='huggingface',
      tokenizer_path=path,
      length=convert_llava.max_length(path),
    )
    return self._reads(self.preprocess.apply_to(data))


class _Detector(_Published):
  """A folder of Hugging Face with a DETR."""

  kind = 'detector'
  format = convert_detr

  @property
  def classes(self):
    """Names of the classes, by number; '' for a number without a name."""
    told = files.config_json(self.path).get('id2label')
    told = told if isinstance(told, dict) else {}
    count = self.config.num_classes
    return tuple(str(told.get(str(i), '')) for i in range(count))

  @functools.cached_property
  def config(self):
    config = self.format.derive(self.path)
    size = self.preprocess.image_size
    return dataclasses.replace(config, image_size=size)

  @functools.cached_property
  def preprocess(self):
    told = DetectionPreprocess(**beside.of_detector(self.path))
    with config_lib.inside(f'the preprocessing beside {self.path}'):
      # `DetectionDataConfig` checks the ranges of the fields.
      data = DetectionDataConfig(source='coco', path=os.fspath(self.path))
      return told.apply_to(data).preprocess


# Sources for folders of Hugging Face, by the `model_type` in `config.json`.
_PUBLISHED = {
  **dict.fromkeys(convert_lm.FAMILIES, _Language),
  **dict.fromkeys(('clip', 'clip_vision_model'), _Tower),
  'detr': _Detector,
  'llava': _VisionLanguage,
  'wav2vec2': _Speech,
}


def _published(folder: pathlib.Path) -> type[_Published] | None:
  """Returns the subclass for a folder of Hugging Face; None for other paths."""
  fields = files.config_json(folder)
  # `_Language` raises an error that names the family, if it is not supported.
  if 'ForCausalLM' in str(fields.get('architectures')):
    return _Language
  return _PUBLISHED.get(str(fields.get('model_type')))
