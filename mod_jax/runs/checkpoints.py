"""Checkpoints: written in the background, whole or not at all, and verified.

A checkpoint is one directory named by its step, written by Orbax: the items
`state` (arrays) and `metadata` (JSON: the step, the position in the data, and
what the caller adds), and beside them `manifest.json`, the size and SHA-256 of
every file of the items. Orbax writes into a temporary directory and renames it
when all hosts are done; the manifest is written just before that renaming, so
every visible checkpoint is complete and can be checked for damage later.
(Object stores cannot rename: there Orbax writes in place, and an unfinished
checkpoint lacks the file `commit_success.txt`.) Nothing in it depends on the
number of hosts: position and arrays are those of the whole run.

This uses Orbax's stable API. The `Checkpointer` of its v1, still experimental
in orbax-checkpoint 0.12.8, deletes old checkpoints in place, so that a kill
leaves an incomplete one under a valid name, and offers no hook before the
commit, when the manifest must be written.
"""

import asyncio
from collections.abc import Callable, Collection
import contextlib
import dataclasses
import functools
import json
from typing import Any

from absl import logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from mod_jax import config as config_lib
from mod_jax import paths, trees
from mod_jax.errors import UserError
from mod_jax.runs import checksums

_STATE, _METADATA = 'state', 'metadata'
# Keys of the item `metadata`.
_STEP, _POSITION, _OF_CALLER = 'step', 'data_position', 'metadata'
_DELETED = 'deleted'  # Directory of checkpoints that are to be deleted.
_CORRUPT = '.corrupt'  # Suffix of unusable checkpoints.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(config_lib.Validated):
  """How often to save, and how many checkpoints to keep."""

  # Steps between checkpoints; 0 saves only at the last step.
  every: config_lib.Count = 1000
  # Minutes between checkpoints, checked after each step (with several hosts,
  # every `log.every` steps); 0 saves by steps alone.
  every_minutes: config_lib.Weight = 3.0
  keep: config_lib.PositiveCount = 3  # Newest checkpoints that stay on disk.
  # Held-out metric, such as accuracy, whose best checkpoint is kept as well;
  # None keeps only the newest checkpoints.
  best: str | None = None
  asynchronous: bool = True  # Whether to write while training goes on.


@dataclasses.dataclass(frozen=True)
class Restored:
  """The contents of a checkpoint."""

  step: int  # The step that the checkpoint was saved at.
  state: Any  # Arrays in the requested structure; None if they were not read.
  metadata: dict[str, Any]  # The JSON object that was saved with it.


def _run_to_the_end(coroutine):
  """Runs a coroutine, and the tasks that are still pending if it fails.

  Orbax's own function closes the event loop as soon as one write fails; then
  every other write that is still running prints a traceback.
  """
  loop = asyncio.new_event_loop()
  try:
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(coroutine)
  finally:
    pending = asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True)
    loop.run_until_complete(pending)
    asyncio.set_event_loop(None)
    loop.close()


# This replaces a private function of Orbax. In versions of Orbax that lack it,
# these tracebacks come back.
with contextlib.suppress(ImportError):
  from orbax.checkpoint._src import asyncio_utils

  asyncio_utils._run_sync_via_new_loop = _run_to_the_end


class _HashingHandler(ocp.PyTreeCheckpointHandler):
  """Saves arrays; then every process hashes the files that it wrote itself.

  If one host hashed all files, a run of many hosts could not finish a save
  within the notice that a preemption gives.
  """

  async def async_save(self, directory, *args, **kwargs):
    """Returns futures of the writes and of the hashing that follows them."""
    written = await super().async_save(directory, *args, **kwargs)
    hash_own = functools.partial(checksums.hash_own_files, directory)
    return [ocp.future.ChainedFuture(written, hash_own)]


@dataclasses.dataclass
class _Spared:
  """A `PreservationPolicy` of Orbax that keeps the checkpoints at `steps`.

  `Checkpointer` replaces `steps` while it runs.
  """

  steps: Collection[int] = ()

  def should_preserve(self, checkpoints, *, context):
    del context
    return [checkpoint.step in self.steps for checkpoint in checkpoints]


class Checkpointer(contextlib.AbstractContextManager):
  """Saves and restores checkpoints as the only writer of their directory.

  The constructor deletes what a killed save left over. To read while another
  process may be saving, use `restore_subtree`.
  """

  def __init__(self, directory, config: CheckpointConfig):
    self.config = config
    self._directory = paths.absolute(directory)
    self._saving = -1
    self._spared = _Spared()
    with _reading_directory(self._directory):
      self._manager = self._new_manager()
      self._purge()

  def _new_manager(self):
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    handlers.add(_STATE, ocp.args.PyTreeSave, _HashingHandler())
    manager = ocp.CheckpointManager(
      self._directory,
      handler_registry=handlers,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(
          [policies.LatestN(self.config.keep), self._spared]
        ),
        cleanup_tmp_directories=True,
        # Deleting in place is not atomic: a kill would leave an incomplete
        # checkpoint under a valid name. So Orbax renames into this directory,
        # and `_purge` deletes.
        todelete_subdir=_DELETED,
        # Reads no metadata: one damaged file would prevent opening the manager.
        lightweight_initialize=True,
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._write_manifest
        ),
      ),
    )
    # The loop asks JAX's preemption service itself (`stop.after_step`). The
    # service expects numbers that only grow: the loop counts the steps of all
    # runs of the process. Orbax would ask by this run's step, which may be
    # lower, and the service could then miss a stop.
    manager.reached_preemption = lambda step: False
    return manager

  def __exit__(self, *exc_info):
    self.close()

  def due(self, step: int) -> bool:
    """Returns whether `config.every` wants a checkpoint after `step` steps."""
    return bool(self.config.every) and step % self.config.every == 0

  def spare(self, step: int) -> None:
    """From now on keeps this step beside the newest ones; call on all hosts."""
    self._spared.steps = (step,)

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints on disk, ascending."""
    return steps(self._directory)

  def save(self, step: int, state, iterator=None, metadata=None) -> None:
    """Saves a checkpoint, unless there is one at this step.

    The arrays are copied and the iterator's position (`get_state()`, the same
    JSON object on all hosts) is noted before this returns. Hence the iterator
    may move on, and the arrays may be donated. With `asynchronous` the files
    are written in the background; the next `save`, `wait` or `close` raises the
    errors of that. `metadata` is a JSON object to save beside the arrays.
    """
    self._manager.wait_until_finished()  # The last save uses `_saving`.
    self._purge()
    if step in self.steps():
      return
    self._saving = step
    saved = {_STEP: step, _OF_CALLER: metadata or {}}
    if iterator is not None:
      saved[_POSITION] = iterator.get_state()
    items = {
      _STATE: ocp.args.PyTreeSave(trees.unflatten(_stored_arrays(state))),
      # Copy now, since Orbax encodes in the background.
      _METADATA: ocp.args.JsonSave(json.loads(json.dumps(saved))),
    }
    self._manager.save(step, args=ocp.args.Composite(**items), force=True)
    if not self.config.asynchronous:
      self.wait()

  def restore(
    self,
    abstract_state,
    iterator=None,
    *,
    check: Callable[[Restored], None] = lambda saved: None,
  ) -> Restored | None:
    """Restores the newest usable checkpoint, bit for bit as it was saved.

    Returns None if there is no checkpoint yet. A damaged or incomplete
    checkpoint is reported and renamed to `<step>.corrupt`, and the previous one
    is used. Raises UserError if no checkpoint is usable, or if an undamaged one
    holds other arrays, or another data position, than this run needs.

    Leaves of `abstract_state` with a sharding are placed accordingly, whatever
    mesh they were saved from; other leaves are uncommitted, on one device.
    `iterator`, if given, is moved to the saved data position. `check` is called
    with the checkpoint before its arrays are read (`state` is None), and raises
    if the checkpoint must not be used.
    """
    self.wait()
    restored, unusable = _restore_newest(
      self._directory,
      self.steps(),
      lambda saved: saved.load(abstract_state, check, iterator, whole=True),
    )
    if unusable:
      # Rename only now: if no checkpoint is usable, all stay in place.
      if jax.process_index() == 0:
        for step in unusable:
          _move_aside(self._directory / str(step))
      if jax.process_count() > 1:
        multihost_utils.sync_global_devices('mod_jax_checkpoints_moved_aside')
      self._manager.reload()
    return restored

  def wait(self) -> None:
    """Blocks until everything saved so far is on disk; raises save errors."""
    self._manager.wait_until_finished()
    self._purge()

  def close(self) -> None:
    """Waits for saves, then releases threads and files."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def _write_manifest(self):
    """Writes the manifest; Orbax calls this on the first host before commit."""
    directory = self._directory / f'{self._saving}{ocp.utils.TMP_DIR_SUFFIX}'
    if not directory.exists():
      # In an object store, which cannot rename, Orbax writes in place.
      directory = self._directory / str(self._saving)
    checksums.write(directory, _STATE)

  def _purge(self):
    """Deletes the old checkpoints that Orbax has moved to `_DELETED`."""
    if jax.process_index() == 0 and (self._directory / _DELETED).exists():
      (self._directory / _DELETED).rmtree()


def restore_subtree(
  directory,
  abstract,
  *,
  step: int | None = None,
  check: Callable[[Restored], None] = lambda saved: None,
) -> Restored | None:
  """Restores some of a checkpoint's arrays, and changes nothing on disk.

  A run may be writing to the directory meanwhile. Leaves are found by their
  path: pass the saved tree with the unwanted parts replaced by None
  (`state.replace(opt_state=None)`), or a dictionary by name (`{'params': …}`).
  If `step` is None, the newest usable checkpoint is read. Returns None if there
  is no checkpoint yet. `check` and errors are as for `Checkpointer.restore`.
  """
  return _restore_beside(
    directory, lambda saved: saved.load(abstract, check), step
  )


def restore_named(
  directory,
  names: Collection[str],
  *,
  step: int | None = None,
  check: Callable[[Restored], None] = lambda saved: None,
) -> Restored | None:
  """Like `restore_subtree`, for fields of the state whose shapes are unknown.

  `names` are the fields, such as `params`. The restored state maps each name to
  nested dictionaries of arrays on one device, empty if nothing was saved.
  """

  def load(saved):
    wanted = {
      path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      for path, leaf in saved.stored.items()
      if path.split('/')[0] in names
    }
    restored = saved.load(trees.unflatten(wanted), check)
    state = {name: restored.state.get(name, {}) for name in names}
    return dataclasses.replace(restored, state=state)

  return _restore_beside(directory, load, step)


def steps(directory) -> list[int]:
  """Returns the steps of the complete checkpoints in a directory, ascending."""
  directory = paths.absolute(directory)
  with _reading_directory(directory):
    try:
      names = {path.name for path in directory.iterdir()}
    except FileNotFoundError:
      return []
    if paths.is_remote(directory):  # Unfinished checkpoints have final names.
      names &= {str(step) for step in ocp.utils.checkpoint_steps(directory)}
  numbers = (int(name) for name in names if name.isdecimal())
  return sorted(number for number in numbers if str(number) in names)


def peek(directory, step: int) -> Restored | None:
  """Reads a checkpoint's step and metadata, unverified; None if unreadable."""
  try:
    return _Saved(paths.absolute(directory) / str(step)).header
  except (OSError, ValueError, KeyError, TypeError):
    return None


class _Unusable(Exception):
  """A checkpoint is damaged; the one before it is used instead."""


@dataclasses.dataclass(frozen=True)
class _Saved:
  """Reads a checkpoint."""

  directory: epath.Path  # Named by the step.

  @functools.cached_property
  def metadata(self) -> dict[str, Any]:
    # Orbax's own reader waits for the other hosts.
    return json.loads((self.directory / _METADATA / 'metadata').read_text())

  @property
  def header(self) -> Restored:
    return Restored(self.metadata[_STEP], None, self.metadata[_OF_CALLER])

  @functools.cached_property
  def stored(self) -> dict[str, Any]:
    """Shape and dtype of all arrays in the checkpoint, by path."""
    handler = ocp.PyTreeCheckpointHandler()
    return trees.by_path(handler.metadata(self.directory / _STATE).tree)

  def verify(self) -> None:
    """Raises _Unusable if files are damaged, or were saved at another step."""
    if problem := _damage(self.directory):
      raise _Unusable(problem)
    if (step := self.metadata.get(_STEP)) != int(self.directory.name):
      raise _Unusable(f'it was saved at step {step}')

  def load(self, abstract, check, iterator=None, *, whole=False) -> Restored:
    """Returns the checkpoint with the arrays that `abstract` names.

    Also moves `iterator` to the data position. With `whole`, raises UserError
    if the checkpoint has other arrays, too. `check` is as for `restore`.
    """
    check(self.header)
    wanted = trees.by_path(abstract)
    tree = {path: _stored_type(leaf) for path, leaf in wanted.items()}
    self._compare(tree, whole)
    args = {path: _restore_args(leaf) for path, leaf in tree.items()}
    arrays = ocp.PyTreeCheckpointHandler().restore(
      self.directory / _STATE,
      args=ocp.args.PyTreeRestore(
        item=trees.unflatten(tree),
        restore_args=trees.unflatten(args),
        partial_restore=True,
      ),
    )
    arrays = trees.by_path(arrays)
    leaves = [_as_wanted(arrays[path], leaf) for path, leaf in wanted.items()]
    if iterator is not None:
      self._restore_iterator(iterator)
    state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return dataclasses.replace(self.header, state=state)

  def _restore_iterator(self, iterator):
    try:
      iterator.set_state(self.metadata[_POSITION])
    except Exception as e:
      why = 'it has none' if _POSITION not in self.metadata else _one_line(e)
      raise UserError(
        f'the checkpoint {self.directory} holds no data position that fits '
        f'this run ({why}): resume with the data that it was saved with, or '
        'start in another workdir'
      ) from e

  def _compare(self, wanted, whole):
    """Raises UserError for the first missing, differing or extra array."""
    stored = _types(self.stored)
    wanted = _types(wanted)
    for path in [*wanted, *(stored if whole else ())]:
      if stored.get(path) != wanted.get(path):
        raise UserError(
          f'{path} is {stored.get(path, "missing")} in the checkpoint'
          f' {self.directory} and {wanted.get(path, "missing")} in this model:'
          ' use the config that the checkpoint was made with, or another'
          ' workdir'
        )


def _types(tree) -> dict[str, str]:
  return {
    path: f'{np.dtype(leaf.dtype)}{tuple(leaf.shape)}'
    for path, leaf in tree.items()
  }


def _restore_beside(directory, load, step=None):
  """Returns `load(saved)` for a checkpoint of a run that may still be saving.

  If `step` is None, takes the newest usable one; returns None without any.
  """
  directory = paths.absolute(directory)
  while True:
    available = steps(directory)
    if step is not None and step not in available:
      raise UserError(
        f'no checkpoint at step {step} in {directory}: expected one of '
        f'{available or "none, there is nothing there"}'
      )
    candidates = available if step is None else [step]
    try:
      return _restore_newest(directory, candidates, load)[0]
    except Exception:
      # The run may have deleted the checkpoint that was being read. If so, try
      # again: there is a newer one.
      if not candidates or candidates[-1] in steps(directory):
        raise


def _restore_newest(directory, steps, load):
  """Calls `load` with the newest usable checkpoint of `steps`, ascending.

  Returns the result of `load`, or None if `steps` is empty; and the steps of
  the newer, unusable checkpoints. Raises UserError if none is usable.
  """
  unusable = {}
  for step in reversed(steps):
    saved = _Saved(directory / str(step))
    try:
      saved.verify()
      # Raise errors here: the files are undamaged, so older ones fail as well.
      restored = load(saved)
      break
    except _Unusable as e:
      unusable[step] = str(e)
  else:
    if not unusable:
      return None, []
    reasons = '; '.join(f'step {step}: {why}' for step, why in unusable.items())
    raise UserError(
      f'no checkpoint in {directory} is usable ({reasons}): restore them from '
      'a copy, or delete the directory to start afresh'
    )
  for failed, why in unusable.items():
    logging.warning(
      'the checkpoint at step %d in %s is unusable (%s): using the one at step'
      ' %d instead.',
      *(failed, directory, why, step),
    )
  return restored, list(unusable)


def _damage(directory) -> str | None:
  """Returns a description of the damage to a checkpoint's files, or None.

  Each host reads a part of the files. Then the hosts agree on whether there is
  any damage: otherwise they would resume from different steps.
  """
  try:
    problem = checksums.damage(directory)
  except OSError as e:
    problem = _one_line(e)
  if jax.process_count() > 1:
    whole = multihost_utils.process_allgather(np.array(problem is None))
    if not whole.all():
      return problem or 'another host found it damaged'
  return problem


@contextlib.contextmanager
def _reading_directory(directory):
  """Context manager: turns an OSError into a UserError about the directory."""
  try:
    yield
  except OSError as e:
    raise UserError(
      f'the checkpoints in {directory} cannot be used '
      f'({e.strerror or _one_line(e)}): give back the directory and the right '
      'to read and write it, or use another workdir'
    ) from e


def _move_aside(directory):
  """Renames a checkpoint so that its step can be saved again."""
  target, n = directory.parent / f'{directory.name}{_CORRUPT}', 1
  while target.exists():
    n += 1
    target = directory.parent / f'{directory.name}{_CORRUPT}{n}'
  directory.rename(target)


def _one_line(error) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# The state is stored as nested dictionaries of plain arrays, and leaves are
# identified by their path. So optimiser classes may be renamed, and the files
# can be read without importing this library.


def _is_key(leaf) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored_arrays(state):
  """Returns the state's leaves by path, PRNG keys as integer arrays."""

  def stored(leaf):
    if not isinstance(leaf, jax.Array):
      return np.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf

  return {path: stored(leaf) for path, leaf in trees.by_path(state).items()}


def _stored_type(leaf) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of a leaf as stored: PRNG keys are integers."""
  sharding = getattr(leaf, 'sharding', None)
  leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  if _is_key(leaf):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _restore_args(leaf):
  if leaf.sharding is None:
    return ocp.RestoreArgs(restore_type=np.ndarray)
  return ocp.ArrayRestoreArgs(
    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
  )


def _as_wanted(array, leaf):
  array = array if isinstance(array, jax.Array) else jnp.array(array)
  if not _is_key(leaf):
    return array
  impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
  return jax.random.wrap_key_data(array, impl=impl)
