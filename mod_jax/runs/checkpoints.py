"""Checkpoints: written in the background, whole or not at all, and verified.

A checkpoint is one directory named by its step, written by Orbax: the items
`state` (arrays) and `metadata` (JSON: the step, the position in the data, and
what the caller adds), and beside them `manifest.json`, the size and SHA-256 of
every file of the items. Orbax writes into a temporary directory and renames it
when all hosts are done; the manifest is written just before that renaming, so
every visible checkpoint is complete and can be checked for damage later.
(Object stores cannot rename: there Orbax writes in place, and an unfinished
checkpoint lacks the file `commit_success.txt`.)

Nothing in a checkpoint depends on the number of hosts: position and arrays are
those of the whole run.

A killed save never leaves a checkpoint without a manifest; somebody must have
deleted it. Such a checkpoint cannot be verified, so it is used only if no other
is usable, and with a warning.

This uses Orbax's stable API. The `Checkpointer` of its v1, still experimental
in orbax-checkpoint 0.12.8, deletes old checkpoints in place, so that a kill
leaves an incomplete one under a valid name. One damaged metadata file can stop
it from opening; `lightweight_initialize` prevents that, but then it cannot save
where an earlier checkpoint exists. The functions of v1 offer no hook before the
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

from mod_jax import config as config_lib
from mod_jax import paths, trees
from mod_jax.errors import UserError
from mod_jax.runs import checksums

_STATE, _METADATA = 'state', 'metadata'
# Keys of the item `metadata`.
_STEP, _POSITION, _CALLERS = 'step', 'data_position', 'metadata'
_DELETED = 'deleted'  # Directory of checkpoints that are to be deleted.
_CORRUPT = '.corrupt'  # Suffix of unusable checkpoints.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """How often to save, and how many checkpoints to keep."""

  # Steps between checkpoints; 0 saves only at the last step.
  every: config_lib.Count = 1000
  # Minutes between checkpoints, checked after each step (with several hosts,
  # every `log.every` steps); 0 saves by steps alone.
  every_minutes: config_lib.Weight = 3.0
  keep: config_lib.PositiveCount = 3  # Newest checkpoints that stay on disk.
  asynchronous: bool = True  # Write while training goes on.

  def __post_init__(self):
    config_lib.validate(self)


@dataclasses.dataclass(frozen=True)
class Restored:
  """The contents of a checkpoint.

  Attributes:
    step: the step it was saved at.
    state: arrays in the requested structure; None if they were not read.
    metadata: the JSON object that was saved with it.
  """

  step: int
  state: Any
  metadata: dict[str, Any]


def _run_to_the_end(coroutine):
  """Runs a coroutine, and the tasks that are still pending if it fails.

  The first write that fails ends the coroutine. Orbax's own function then
  closes the event loop under the other writes, and each prints a traceback.
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


# A private function of Orbax. In a version that has moved it, only these
# tracebacks come back.
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


class Checkpointer:
  """Saves and restores training; the only writer of its directory.

  To read while a run is training, use `restore_subtree`: a second Checkpointer
  would delete the temporary files of the first.
  """

  def __init__(self, directory, config: CheckpointConfig):
    """Creates or opens `directory`, and clears what a killed save left.

    Args:
      directory: where the checkpoints lie, one folder per step. All hosts must
        see the same files.
      config: see `CheckpointConfig`.
    """
    self.config = config
    self._directory = paths.absolute(directory)
    self._saving = -1
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
        max_to_keep=self.config.keep,
        cleanup_tmp_directories=True,
        # Deleting in place is not atomic: a kill would leave an incomplete
        # checkpoint under a valid name. So Orbax renames into this directory,
        # and `_purge` deletes.
        todelete_subdir=_DELETED,
        # Otherwise one damaged metadata file prevents opening the manager.
        lightweight_initialize=True,
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._write_manifest
        ),
      ),
    )
    # Orbax would query JAX's preemption service with the steps of this run. The
    # loop queries it with numbers that grow over all runs of the process
    # (`stop.after_step`); mixing both, the service can miss a stop.
    manager.reached_preemption = lambda step: False
    return manager

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def due(self, step: int) -> bool:
    """Whether the config wants a checkpoint after `step` steps."""
    return bool(self.config.every) and step % self.config.every == 0

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints on disk, ascending."""
    return steps(self._directory)

  def save(self, step: int, state, iterator=None, metadata=None) -> None:
    """Saves a checkpoint, unless there is one at this step.

    The arrays are copied and the iterator's position is noted before this
    returns, so both may move on, and the arrays may be donated. With
    `asynchronous` the rest happens in the background; an error there is raised
    by the next `save`, `wait` or `close`.

    Args:
      step: number of steps taken.
      state: pytree of arrays, sharded or not, typed PRNG keys included.
      iterator: feeds the training, if anything does. Its `get_state()` is a
        JSON object, and the same on all hosts.
      metadata: a JSON object to keep with it, such as the config.
    """
    self._manager.wait_until_finished()  # Before `_saving` changes.
    self._purge()
    if step in self.steps():
      return
    self._saving = step
    saved = {_STEP: step, _CALLERS: metadata or {}}
    if iterator is not None:
      saved[_POSITION] = iterator.get_state()
    items = {
      _STATE: ocp.args.PyTreeSave(trees.unflatten(_stored_arrays(state))),
      # Orbax encodes in the background: take the copy now.
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
    report: Callable[[str], None] = logging.warning,
  ) -> Restored | None:
    """Restores the newest usable checkpoint, bit for bit as it was saved.

    A checkpoint that is damaged or incomplete is reported, moved aside to
    `<step>.corrupt`, and the one before it is used.

    Args:
      abstract_state: the state, with `jax.ShapeDtypeStruct` (or arrays) for
        leaves. Leaves with a sharding are placed accordingly, whatever mesh
        they were saved from; the others come uncommitted on one device.
      iterator: the iterator whose position to restore by `set_state`.
      check: is called with the checkpoint before its arrays are read (`state`
        is None), and raises if it must not be used.
      report: is called with one sentence for each checkpoint passed over, and
        for one that is used without a manifest.

    Returns:
      The checkpoint, or None where there is none yet.

    Raises:
      UserError: there are checkpoints, but none is usable; or one is whole but
        holds other arrays, or another data position, than this run needs, or
        is of an older version of this library.
    """
    self.wait()
    restored, unusable = _restore_newest(
      self._directory,
      self.steps(),
      lambda source: source.load(
        abstract_state, iterator, whole=True, check=check
      ),
      report,
    )
    if unusable:
      # Not before one was restored: if none is usable, all stay in place.
      if jax.process_index() == 0:
        for step in unusable:
          _move_aside(self._directory / str(step))
      if jax.process_count() > 1:
        multihost_utils.sync_global_devices('mod_jax_checkpoints_moved_aside')
      self._manager.reload()
    return restored

  def wait(self) -> None:
    """Blocks until everything saved so far is on disk; raises its errors."""
    self._manager.wait_until_finished()
    self._purge()

  def close(self) -> None:
    """Waits for saves, then releases threads and files."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def _write_manifest(self):
    """Called on the first host after all items are written, before commit."""
    directory = self._directory / f'{self._saving}{ocp.utils.TMP_DIR_SUFFIX}'
    if not directory.exists():
      # Where a file system cannot rename, Orbax writes in place.
      directory = self._directory / str(self._saving)
    checksums.write(directory, _STATE)

  def _purge(self):
    """Deletes the checkpoints that exceed `keep`."""
    if jax.process_index() == 0 and (self._directory / _DELETED).exists():
      (self._directory / _DELETED).rmtree()


def restore_subtree(
  directory,
  abstract,
  *,
  step: int | None = None,
  check: Callable[[Restored], None] = lambda saved: None,
  report: Callable[[str], None] = logging.warning,
) -> Restored | None:
  """Restores some of a checkpoint's arrays, and changes nothing on disk.

  Leaves are found by their path: pass the saved tree with the unwanted parts
  replaced by None (`state.replace(opt_state=None)`), or a dictionary by name
  (`{'params': ...}`).

  Args:
    directory: of the checkpoints; a run may be writing to it meanwhile.
    abstract: `jax.ShapeDtypeStruct` leaves of the wanted arrays; those with a
      sharding are placed accordingly.
    step: the checkpoint to read; by default the newest usable one.
    check: as for `Checkpointer.restore`.
    report: is called with one sentence for each checkpoint passed over.

  Returns:
    The checkpoint with the wanted arrays, or None where there is none yet.

  Raises:
    UserError: there is no such step, no checkpoint is usable, or a leaf is not
      in the checkpoint as wanted.
  """
  return _restore_beside(
    paths.absolute(directory),
    lambda source: source.load(abstract, check=check),
    report,
    step=step,
  )


def restore_named(
  directory,
  names: Collection[str],
  *,
  check: Callable[[Restored], None] = lambda saved: None,
  report: Callable[[str], None] = logging.warning,
) -> Restored | None:
  """Restores parts of the newest checkpoint without knowing their shapes.

  Args:
    directory: of the checkpoints; a run may be writing to it meanwhile.
    names: of the parts, such as `params`.
    check: as for `Checkpointer.restore`.
    report: is called with one sentence for each checkpoint passed over.

  Returns:
    The checkpoint, its state as nested dictionaries with arrays on one device;
    None if there is none yet. A part that was not saved, such as an empty one,
    is an empty dictionary.

  Raises:
    UserError: no checkpoint is usable.
  """

  def load(source):
    wanted = {
      path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      for path, leaf in source.stored.items()
      if path.split('/')[0] in names
    }
    restored = source.load(trees.unflatten(wanted), check=check)
    state = {name: restored.state.get(name, {}) for name in names}
    return dataclasses.replace(restored, state=state)

  return _restore_beside(paths.absolute(directory), load, report)


def steps(directory) -> list[int]:
  """Returns the steps of the complete checkpoints in a directory, ascending.

  Args:
    directory: of the checkpoints; may be missing.
  """
  directory = paths.absolute(directory)
  with _reading_directory(directory):
    try:
      entries = list(directory.iterdir())
    except FileNotFoundError:
      return []
    complete = {
      step
      for step in ocp.utils.checkpoint_steps(directory)
      if (directory / str(step)).exists()
    }
    if paths.is_remote(directory):  # Unfinished ones have their final name.
      return sorted(complete)
    # A file with the name of a step is a damaged checkpoint.
    files = {path.name for path in entries if not path.is_dir()}
    return sorted(complete | {int(name) for name in files if name.isdecimal()})


def peek(directory, step: int) -> Restored | None:
  """Returns a checkpoint's step and metadata, without verifying its files.

  Args:
    directory: of the checkpoints.
    step: of the checkpoint.

  Returns:
    The checkpoint without arrays, or None if its metadata cannot be read.
  """
  try:
    saved = _read_metadata(paths.absolute(directory) / str(step))
    return Restored(step=saved[_STEP], state=None, metadata=saved[_CALLERS])
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _read_metadata(checkpoint) -> dict[str, Any]:
  # Orbax's own reader waits for the other hosts.
  return json.loads((checkpoint / _METADATA / 'metadata').read_text())


class _Unusable(Exception):
  """A checkpoint is damaged; the one before it is used instead."""


@dataclasses.dataclass(frozen=True)
class _Source:
  """A checkpoint on disk in which `_open` found no damage."""

  directory: epath.Path
  verified: bool  # Whether its files agree with a manifest.
  saved: dict[str, Any]  # The item `metadata`.

  def load(self, abstract, iterator=None, *, whole=False, check) -> Restored:
    """Reads the wanted arrays and the metadata, and positions the iterator.

    Args:
      abstract: pytree of the wanted arrays.
      iterator: Grain iterator or None.
      whole: whether any other array in the checkpoint is an error.
      check: as for `Checkpointer.restore`.
    """
    step, metadata = self.saved[_STEP], self.saved[_CALLERS]
    check(Restored(step=step, state=None, metadata=metadata))
    wanted = trees.by_path(abstract)
    self._check(wanted, whole)
    with _reading('its arrays', self.verified):
      tree = {path: _stored_type(leaf) for path, leaf in wanted.items()}
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
    return Restored(step=step, state=state, metadata=metadata)

  @functools.cached_property
  def stored(self) -> dict[str, Any]:
    """Shape and dtype of all arrays in the checkpoint, by path."""
    with _reading('its list of arrays', self.verified):
      handler = ocp.PyTreeCheckpointHandler()
      return trees.by_path(handler.metadata(self.directory / _STATE).tree)

  def _restore_iterator(self, iterator):
    try:
      iterator.set_state(self.saved[_POSITION])
    except Exception as e:
      why = 'it has none' if _POSITION not in self.saved else _one_line(e)
      raise UserError(
        f'the checkpoint {self.directory} holds no data position that fits '
        f'this run ({why}): resume with the data that it was saved with, or '
        'start in another workdir'
      ) from e

  def _check(self, wanted, whole):
    """Raises UserError for the first missing, differing or extra leaf."""
    way_out = (
      'use the config that the checkpoint was made with, or another workdir'
    )
    for path, leaf in wanted.items():
      leaf = _stored_type(leaf)
      if path not in self.stored:
        raise UserError(
          f'the checkpoint {self.directory} has no {path}, which this model '
          f'needs with shape {leaf.shape}: {way_out}'
        )
      stored = self.stored[path]
      for what, saved, here in (
        ('shape', tuple(stored.shape), leaf.shape),
        ('dtype', np.dtype(stored.dtype), leaf.dtype),
      ):
        if saved != here:
          raise UserError(
            f'{path} has {what} {saved} in the checkpoint {self.directory} but '
            f'{here} in this model: {way_out}'
          )
    extra = [path for path in self.stored if path not in wanted]
    if whole and extra:
      raise UserError(
        f'the checkpoint {self.directory} has {extra[0]} with shape '
        f'{tuple(self.stored[extra[0]].shape)}, which this model lacks: '
        f'{way_out}'
      )


@contextlib.contextmanager
def _reading(what, verified):
  """Turns errors into `_Unusable`, unless the files were verified.

  Verified files are undamaged, so the error has another cause, and another
  checkpoint would fail in the same way.
  """
  try:
    yield
  except (MemoryError, _Unusable):
    raise
  except Exception as e:
    if verified:
      raise
    raise _Unusable(f'{what} cannot be read: {_one_line(e)}') from e


def _restore_beside(directory, load, report, *, step=None):
  """Loads a checkpoint while a run may be saving and deleting others.

  Args:
    directory: of the checkpoints.
    load: reads a `_Source`; raises _Unusable.
    report: as for `Checkpointer.restore`.
    step: which checkpoint; None for the newest usable one.

  Returns:
    The result of `load`, or None if there is no checkpoint yet.
  """
  while True:
    available = steps(directory)
    if step is not None and step not in available:
      raise UserError(
        f'no checkpoint at step {step} in {directory}: expected one of '
        f'{available or "none, there is nothing there"}'
      )
    candidates = available if step is None else [step]
    try:
      return _restore_newest(directory, candidates, load, report)[0]
    except Exception:
      # The run may have deleted the one that was being read; then there is a
      # newer one.
      if not candidates or candidates[-1] in steps(directory):
        raise


def _restore_newest(directory, steps, load, report):
  """Loads the newest usable checkpoint.

  Args:
    directory: of the checkpoints.
    steps: which to try, ascending.
    load: reads a `_Source`; raises _Unusable.
    report: as for `Checkpointer.restore`.

  Returns:
    The result of `load` (None without any steps) and the unusable steps.
  """
  unusable, doubtful = {}, {}

  def sources():
    """Yields verified sources, then those without manifest; newest first."""
    for step in reversed(steps):
      try:
        source = _open(directory / str(step))
      except _Unusable as e:
        unusable[step] = str(e)
        continue
      if source.verified:
        yield step, source
      else:
        doubtful[step] = source
    yield from doubtful.items()

  for used, source in sources():
    try:
      restored = load(source)
    except _Unusable as e:
      unusable[used] = str(e)
      continue
    if source.verified:
      missing = (
        f'its {checksums.MANIFEST} is missing, so nothing vouches for it'
      )
      unusable |= dict.fromkeys(doubtful, missing)
    else:
      report(
        f'nothing vouches for the checkpoint at step {used} in {directory}, '
        f'for its {checksums.MANIFEST} is missing: using it, since there is no '
        'better one'
      )
    for failed, why in unusable.items():
      report(
        f'the checkpoint at step {failed} in {directory} is unusable ({why}): '
        f'using the one at step {used} instead'
      )
    return restored, list(unusable)
  if unusable:
    reasons = '; '.join(
      f'step {failed}: {why}' for failed, why in unusable.items()
    )
    raise UserError(
      f'no checkpoint in {directory} is usable ({reasons}): restore them from '
      'a copy, or delete the directory to start afresh'
    )
  return None, []


def _open(directory) -> _Source:
  """Verifies a checkpoint and reads its metadata; raises _Unusable."""
  verified = _verify(directory)
  with _reading('its metadata', verified):
    saved = _read_metadata(directory)
    step = int(directory.name)
    if saved.get(_STEP, step) != step:
      raise _Unusable(f'it was saved at step {saved[_STEP]}')
  if _STEP not in saved:
    raise UserError(
      f'the checkpoint {directory} was saved by an older version of mod_jax, '
      'with a data position for each host: go on with that version, or start '
      'in another workdir'
    )
  return _Source(directory, verified, saved)


def _verify(directory) -> bool:
  """Checks a checkpoint's files; returns whether it has a manifest.

  Each host reads a part of the files, and all come to the same result:
  otherwise they would resume from different steps. Raises _Unusable.
  """
  problem, verified = None, False
  try:
    verified = (directory / checksums.MANIFEST).exists()
    problem = checksums.damage(directory) if verified else None
  except OSError as e:
    problem = _one_line(e)
  if jax.process_count() > 1:
    problems = multihost_utils.process_allgather(
      np.array([problem is not None, not verified])
    )
    any_damaged, any_missing = np.any(problems, axis=0)
    verified = not any_missing
    if any_damaged and problem is None:
      problem = 'another host found it damaged'
  if problem:
    raise _Unusable(problem)
  return verified


@contextlib.contextmanager
def _reading_directory(directory):
  """Turns OSError into a UserError about the directory."""
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
