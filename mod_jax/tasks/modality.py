"""Data, losses, metrics and pictures of one kind of input."""

import abc
from collections.abc import Callable, Iterable, Mapping
import typing
from typing import Any

from etils import epath
import jax
import numpy as np

from mod_jax import viz
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.runs import workdir as workdir_lib
from mod_jax.train.task import Data, Study

if typing.TYPE_CHECKING:  # Slow to import.
  from matplotlib.figure import Figure


ROWS = 'rows'  # Name of the `Rows` that `eval_sums` keeps, weights included.


class Modality(Data):
  """Batches, losses, metrics and pictures of one kind of input.

  The argument `task` of methods is the `plain.Plain` that uses the modality.

  Attributes:
    config: config of the experiment.
    example: an example of a config of the data, for messages.
    row: what a row of a batch is, in the plural, such as 'images'.
    length: arguments of a model's `flops_table`: the number of tokens of a
      sequence; empty if the model's config determines that number.
    columns: held-out metrics in the summary table.
    loss_unit: for a loss in nats, what it is a mean over, such as 'token'; ''
      for other losses.
    optional: regular expressions, matched whole, of parameters that may be
      missing from the model or from the weights that it starts from.
  """

  example: str
  row: str
  columns: tuple[str, ...]
  loss_unit: str = ''
  length: tuple[int, ...] = ()
  optional: tuple[str, ...] = ()

  def __init__(self, config, workdir=None):
    """Keeps the config and the run's directory; reads no data."""
    self.config, self._workdir = config, workdir

  def kept(self, name: str) -> epath.Path | None:
    """Returns the file `name` of this run, or else of the run at `init`.

    Returns None if both lack the file. Runs keep what was made of the training
    data, such as a tokenizer, since the data may change.
    """
    directories = filter(None, (self._workdir, self.config.init))
    files = (workdir_lib.expand(path) / name for path in directories)
    return next((file for file in files if file.is_file()), None)

  def train_iterator(self, *, shard_index=0, shard_count=1):
    return self.endless(
      batch_size=self.config.train.batch_size // shard_count,
      seed=self.config.seed,
      shard_index=shard_index,
      shard_count=shard_count,
    )

  @abc.abstractmethod
  def endless(self, **kwargs):
    """Returns endless training batches; keywords as of `batches.endless`."""

  @abc.abstractmethod
  def row_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of each array of a training row, by name."""

  def batch_shapes(self):
    rows = self.config.train.batch_size
    return {
      name: jax.ShapeDtypeStruct((rows, *shape), dtype)
      for name, (shape, dtype) in self.row_shapes().items()
    }

  def split(self, name: str):
    """Returns the split 'train' or 'eval': `len` in rows, `fingerprint()`."""
    raise NotImplementedError  # Override this, or the three methods below.

  def rows_per_epoch(self) -> int:
    """Returns the number of rows in the training data."""
    return len(self.split('train'))

  def data_fingerprint(self):
    return {
      'source': self.config.data.source,
      'train': self.split('train').fingerprint(),
      'held_out': self.split('eval').fingerprint(),
    }

  def data_summary(self):
    train, held_out = (len(self.split(name)) for name in ('train', 'eval'))
    return f'{train:,} {self.row} for training, {held_out:,} held out'

  # Model inputs, losses and metrics of a batch.

  @abc.abstractmethod
  def inputs(self, batch, *, train: bool) -> tuple[tuple, dict[str, Any]]:
    """Returns the model's positional and keyword arguments for a batch."""

  @abc.abstractmethod
  def loss(self, output, batch) -> tuple[Any, Any]:
    """Returns the loss of a training batch: (total, weight)."""

  def losses(self, output, batch) -> tuple[list[Pair], MetricSums]:
    """Returns the terms of the training loss, and the metric sums to report."""
    pair = self.loss(output, batch)
    return [pair], {'loss': pair}

  @abc.abstractmethod
  def eval_sums(self, output, batch, mode: Mode) -> MetricSums:
    """Returns the metric sums of a held-out batch, including `loss`."""

  @abc.abstractmethod
  def token_weights(self, batch):
    """Returns weight_BL: 1 for tokens of a held-out batch, 0 for padding.

    L is 1 if all tokens of a row have the same weight.
    """

  def modes(self, *, more: bool = False) -> dict[str, Mode]:
    """Returns the modes of evaluation, by prefix, as `Method.eval_modes`.

    They are the plain mode and, for routed models, `never/`, which skips the
    routed blocks. Models whose experts choose tokens lack `never/`, since
    skipping blocks would change the choices of the experts, too.
    """
    if more:
      return {}
    modes, model = {'': Mode()}, self.config.model
    tokens_choose = model.experts is None or model.experts.choice == 'token'
    if model.routing is not None and tokens_choose:
      modes['never/'] = Mode(routing=RoutingMode(rule='never'))
    return modes

  def finish_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
    """Returns held-out metrics with derived ones added.

    The metrics of `of_rows` replace the `ROWS` that `eval_sums` returns.
    """
    finished = {}
    for name, value in metrics.items():
      prefix = name.removesuffix(ROWS)
      if prefix == name:
        finished[name] = value
        continue
      real = value['weight'] > 0
      rows = {kept: x[real] for kept, x in value.items()}
      finished |= {prefix + k: float(x) for k, x in self.of_rows(rows).items()}
    return finished

  def of_rows(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics that are not sums, from arrays kept for all real rows."""
    raise NotImplementedError  # Only called if `eval_sums` returns `ROWS`.

  # Reports.

  @abc.abstractmethod
  def summary(self, task, metrics: Mapping[str, float]) -> str:
    """Returns held-out metrics as a table to print."""

  def curves(self, records) -> 'Figure':
    """Returns the figure of the losses in a run's records."""
    return viz.loss_curves(
      records, title='Loss over training', unit=self.loss_unit
    )

  def pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of the trained model, routing and experts included."""
    return {}

  def load_pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of an adaptive model's compute for tokens and rows."""
    return {}

  def studies(self) -> dict[str, Callable[..., Study]]:
    """Returns the studies of a trained model, by name.

    Each is called with (task, params, model_state), on one device.
    """
    return {}

  def texts(self, task, params, model_state) -> Iterable[str]:
    """Yields texts to show at the end of a run."""
    return ()


def table(
  metrics, columns, rows, *, title='', more=(), first: int = 12, width: int = 14
) -> list[str]:
  """Returns the lines of a table of metrics, aligned at the right.

  Each of `rows` is a title, the prefix of its metrics, and further cells. The
  header is `title`, `columns` and, above the further cells, `more`. `first` is
  the width of the first column, `width` the minimum width of the others.
  """
  lines = [[title, *columns, *more]]
  for name, prefix, *cells in rows:
    values = (metrics.get(prefix + column) for column in columns)
    shown = ('-' if x is None else f'{x:.4f}' for x in values)
    lines.append([name, *shown, *cells])
  widths = [max(width, len(column) + 2) for column in lines[0][1:]]
  return [
    name.ljust(first) + ''.join(map(str.rjust, cells, widths))
    for name, *cells in lines
  ]
