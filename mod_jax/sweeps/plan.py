"""Plans a sweep at equal training FLOPs: its runs, and what they will cost.

A sweep has several budgets of training FLOPs. For each budget and each group of
models, such as dense and routed ones, it trains models of several sizes around
the expected optimum, each for as many steps as the budget allows. Hoffmann et
al. 2022, approach 2; Raposo et al. 2024, Figures 3 and 4.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import operator
import re
import sys
from typing import Annotated, Any

from absl import flags

from mod_jax import cli, flops, tables
from mod_jax import config as config_lib
from mod_jax.data import text
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import manifest
from mod_jax.sweeps.manifest import Entry
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.viz import style

FILE = 'plan.txt'  # The table, with the price.
_TOLERANCE = 0.01  # A run may miss its budget by this fraction of the budget.
_HOUR = 3600.0

# Cached: counting traces the model, and the same model occurs at several
# budgets, in several groups and with several seeds.
num_params = functools.cache(flops.num_params)

# Blocks, width and heads of a model.
Shape = tuple[config_lib.Unrolled, config_lib.Width, config_lib.Size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Models that make up one curve: loss against size, at each budget."""

  name: str  # The curve's name in tables and pictures.
  # How their blocks are routed; None for dense models.
  routing: MoDConfig | None = None
  # Parameters, embedding and head included, of the model that is expected to be
  # best at the sweep's `optimum_budget`.
  optimum: config_lib.Positive = 1e6
  # Shapes to choose from; () = the sweep's `shapes`.
  shapes: tuple[Shape, ...] = ()
  # Number of sizes at each budget; 0 = the sweep's `num_sizes`.
  num_sizes: config_lib.Count = 0
  # Which of the sweep's budgets the group has, as indices from 0; () = all.
  budgets: tuple[config_lib.Count, ...] = ()
  # Multiplies the learning rate that the sweep sets for the model's width.
  rate_factor: config_lib.Factor = 1.0
  # The control 'routed blocks removed': models that have the dense blocks only,
  # each trained for as many steps as its routed counterpart. They see the same
  # tokens at fewer FLOPs, so this group stays below its budget.
  without_routed_blocks: bool = False

  def __post_init__(self):
    config_lib.validate(self)
    if not re.fullmatch(r'[A-Za-z0-9_.-]+', self.name):
      raise UserError(
        f'name={self.name!r}: expected letters, digits and any of _.-, since'
        " it becomes part of the directories' names."
      )
    if self.without_routed_blocks and self.routing is None:
      raise UserError(
        f'the group {self.name} is without_routed_blocks, but routing is None:'
        ' say of which routed models the blocks are removed.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
  """A sweep, as built by `configs/sweeps/*.py`."""

  name: str = 'sweep'  # A label; nothing depends on it.
  # The config that all runs share: data, batch, optimiser, evaluation, mesh.
  # The sweep sets for each run the model's shape and routing, the number of
  # steps, the warm-up, the learning rate, evaluation.every and the seed, so
  # these fields of `base` have no effect.
  base: ExperimentConfig = ExperimentConfig()
  budgets: tuple[config_lib.Positive, ...] = (1e13,)  # Training FLOPs of a run.
  # Number of seeds, from 0, of each model: one number for all budgets, or one
  # for each.
  num_seeds: tuple[config_lib.PositiveCount, ...] = (1,)
  # The groups of models, a curve for each.
  groups: tuple[Group, ...] = (Group(name='dense'),)
  # Shapes to choose from: blocks, width, heads. Each group takes at each budget
  # those nearest to its expected optimum.
  shapes: tuple[Shape, ...] = ((4, 64, 2), (4, 96, 3), (4, 128, 4))
  # Number of sizes per group: one number for all budgets, or one for each.
  num_sizes: tuple[config_lib.PositiveCount, ...] = (5,)
  # Sizes may differ from the expected optimum by this factor at most.
  spread: Annotated[float, config_lib.Range(gt=1, le=1000)] = 4.0
  # The budget for which the groups' `optimum` is given; None for the lowest.
  optimum_budget: config_lib.Positive | None = None
  # The exponent by which the optimum grows with the budget.
  growth: config_lib.Probability = 0.5
  # The peak learning rate of models of width `rate_width`, in all groups.
  learning_rate: config_lib.Positive = 1e-3
  rate_width: config_lib.Width = 192  # The width that has `learning_rate`.
  # The exponent by which the learning rate falls with the width.
  rate_power: Annotated[float, config_lib.Range(ge=0, le=2)] = 0.5
  warmup: config_lib.BelowOne = 0.1  # As a fraction of the steps.
  # Number of evaluations during a run, besides the one at its end.
  evaluations: config_lib.Count = 4
  # Training tokens of the corpus; None to count them in the data if possible.
  corpus_tokens: config_lib.Positive | None = None
  # Peak FLOP/s of a chip, for the chip-hours in the plan.
  peak_flops: config_lib.Positive = 1e14
  # The fraction of that peak which training is expected to reach.
  utilization: config_lib.Fraction = 0.4

  def __post_init__(self):
    """Validates the fields and their combinations."""
    config_lib.validate(self)
    if not isinstance(self.base.model, LMConfig):
      raise UserError(
        f'base.model={type(self.base.model).__name__}: sweeps at equal FLOPs'
        ' are of language models, so expected LMConfig.'
      )
    for name in (
      *('objective', 'dense', 'model.adaptive', 'train.capacity_warmup_steps'),
      *('train.num_epochs', 'train.early_stop', 'train.frozen'),
    ):
      if value := operator.attrgetter(name)(self.base):
        raise UserError(
          f'base.{name}={value}: its FLOPs are not planned for; leave it at'
          ' its default in a sweep at equal FLOPs.'
        )
    for name in ('budgets', 'groups', 'shapes'):
      values = getattr(self, name)
      if not values or len(set(values)) < len(values):
        raise UserError(f'{name}={values}: expected at least one, each once.')
    if list(self.budgets) != sorted(self.budgets):
      raise UserError(f'budgets={self.budgets}: expected the lowest first.')
    for name in ('num_seeds', 'num_sizes'):
      numbers = getattr(self, name)
      if len(numbers) not in (1, len(self.budgets)):
        raise UserError(
          f'{name}={numbers} and {len(self.budgets)} budgets: expected one'
          ' number for all of them, or one for each.'
        )
    names = [group.name for group in self.groups]
    if len(set(names)) < len(names):
      raise UserError(f'groups {names}: expected each name once.')
    for group in self.groups:
      if max(group.budgets, default=0) >= len(self.budgets):
        raise UserError(
          f'the group {group.name} has budgets={group.budgets}, counted from 0,'
          f' and the sweep has {len(self.budgets)}: expected fewer.'
        )

  def at(self, numbers: tuple[int, ...], budget: float) -> int:
    """Returns the budget's entry of `numbers`: one for all, or one for each."""
    return numbers[self.budgets.index(budget) % len(numbers)]


def rate_search(
  sweep: SweepConfig, shapes: Sequence[Shape], rate: float
) -> SweepConfig:
  """Returns a sweep that searches for the learning rate of a sweep's models.

  It trains dense models with five rates, each twice the previous one, at the
  lowest budget and with one seed.

  Args:
    sweep: the sweep.
    shapes: two or more sizes, to find how the rate should fall with the width.
    rate: the middle rate, for models of width `rate_width`.
  """
  dense = next(group for group in sweep.groups if group.routing is None)
  return dataclasses.replace(
    sweep,
    name=f'{sweep.name}_tune',
    learning_rate=rate,
    budgets=sweep.budgets[:1],
    num_seeds=(1,),
    groups=tuple(
      Group(name=f'rate_x{factor:g}', optimum=dense.optimum, rate_factor=factor)
      for factor in (0.25, 0.5, 1.0, 2.0, 4.0)
    ),
    shapes=tuple(shapes),
    num_sizes=(len(shapes),),
  )


def entries(sweep: SweepConfig) -> list[Entry]:
  """Returns all runs of a sweep: those of the first seed, then the second.

  Raises:
    UserError: a budget or a corpus is too small, there are not enough sizes
      around an expected optimum, or two runs would have the same name.
  """
  planned = []
  for i, budget in enumerate(sweep.budgets):
    reference = _reference(sweep, budget)
    for group in sweep.groups:
      if group.budgets and i not in group.budgets:
        continue
      for shape in choose_shapes(sweep, group, budget):
        config = _run(sweep, group, budget, shape)
        run_facts = facts(config, budget, reference)
        # Whether the run spends the budget, and so is part of a fitted curve.
        run_facts['equal_flops'] = not group.without_routed_blocks
        num_layers, width, _ = shape
        size = f'{num_layers} x {width} of the group {group.name}'
        if run_facts['equal_flops']:
          _check_steps(size, budget, run_facts)
        name = f'{group.name}_{budget:g}_{num_layers}x{width}'.replace('+', '')
        entry = Entry(
          id=name,
          group=group.name,
          budget=budget,
          seed=0,
          config=config,
          facts=run_facts,
        )
        planned.append((size, entry))
  corpus = _corpus_tokens(sweep)
  if corpus is not None:
    _check_corpus(sweep, corpus, planned)
  seeded = []
  for _, entry in planned:
    run_facts = entry.facts
    if corpus is not None:
      epochs = run_facts['tokens'] / corpus
      run_facts = run_facts | {'corpus_tokens': corpus, 'epochs': epochs}
    for seed in range(sweep.at(sweep.num_seeds, entry.budget)):
      name = f'{entry.id}_s{seed}'
      config = config_lib.replace(entry.config, {'name': name, 'seed': seed})
      changes = {'id': name, 'seed': seed, 'config': config, 'facts': run_facts}
      seeded.append(dataclasses.replace(entry, **changes))
  counts = collections.Counter(entry.id for entry in seeded)
  name, times = counts.most_common(1)[0]
  if times > 1:
    raise UserError(
      f'{times} runs would be called {name}: leave out one of the shapes of the'
      ' same depth and width, or take budgets further apart.'
    )
  # Sort by seed: a sweep that is stopped early then has runs at every budget.
  return sorted(seeded, key=lambda entry: entry.seed)


def choose_shapes(
  sweep: SweepConfig, group: Group, budget: float
) -> list[Shape]:
  """Returns shapes around a group's expected optimum, the smallest first."""
  expected = _expected(sweep, group, budget)
  num_sizes = group.num_sizes or sweep.at(sweep.num_sizes, budget)
  shapes, routing = group.shapes or sweep.shapes, group.routing
  if routing is not None:  # Leave out shapes without a block to route.
    shapes = [s for s in shapes if any(map(routing.is_routed, range(s[0])))]
  sizes = {s: num_params(_model(sweep, routing, s)) for s in shapes}
  distance = {s: abs(math.log(size / expected)) for s, size in sizes.items()}
  chosen = [s for s in sizes if distance[s] <= math.log(sweep.spread)]
  chosen = sorted(chosen, key=distance.get)[:num_sizes]
  at = f'the group {group.name} at {budget:g} FLOPs'
  if len(chosen) < num_sizes:
    available = ', '.join(f'{size:g}' for size in sorted(sizes.values()))
    raise UserError(
      f'{at} has {len(chosen)} sizes within a factor of {sweep.spread:g} of the'
      f' expected optimum, {style.quantity(expected)} parameters, and'
      f' num_sizes={num_sizes}: add shapes there (the sizes are'
      f' {available or "none"}), raise spread, or ask for fewer.'
    )
  chosen.sort(key=sizes.get)
  smallest, largest = sizes[chosen[0]], sizes[chosen[-1]]
  if num_sizes > 2 and not smallest < expected < largest:
    raise UserError(
      f'{at} would have sizes from {style.quantity(smallest)} to'
      f' {style.quantity(largest)} parameters, all on one side of the expected'
      f' optimum, {style.quantity(expected)}: add shapes on the other side.'
    )
  return chosen


def facts(
  run: ExperimentConfig, budget: float, reference: int | None = None
) -> dict[str, Any]:
  """Returns what can be computed about a run before it starts.

  * `params`: parameters of the model, and `embedding_params`, those of the
    embedding and the head (counted once if they are tied).
  * `forward_flops`: FLOPs of a forward pass over one sequence, and
    `head_flops`, the head's part of them.
  * `relative_flops`: `forward_flops` over `reference`.
  * `steps`, `tokens`, `train_flops`: steps, tokens and FLOPs of the training,
    and `of_budget`, the FLOPs as a fraction of the budget.

  `reference` is the FLOPs of a forward pass of the dense model that is expected
  to be best at the budget; None if the sweep has no dense models.
  """
  model, length = run.model, run.data.length
  forward = flops.forward(model, length)
  rows = run.train.num_steps * run.train.batch_size
  train = rows * flops.train(model, length)
  num_tables = 1 if model.tied_head else 2
  values = {
    'params': num_params(model),
    'embedding_params': num_tables * model.vocab_size * model.width,
    'forward_flops': forward,
    'head_flops': flops.products(dict(model.flops_table(length))['head']),
    'steps': run.train.num_steps,
    'tokens': rows * length,
    'train_flops': train,
    'of_budget': train / budget,
  }
  if reference is not None:
    values['relative_flops'] = forward / reference
  return values


def table(sweep: SweepConfig, runs: Sequence[Entry]) -> str:
  """Returns the plan as text: a row for each size, then the chip-hours."""
  sizes = {}
  for entry in runs:
    sizes.setdefault(entry.id.rpartition('_s')[0], []).append(entry)
  rows = [_row(sweep, seeds) for seeds in sizes.values()]
  lines = tables.aligned([list(rows[0]), *(row.values() for row in rows)])
  price = f'{sweep.utilization:.0%} of {sweep.peak_flops:.3g} FLOP/s'
  lines += ['', f'{len(runs)} runs; chip-hours at {price}:']
  for budget in sweep.budgets:
    by_group = {}
    for entry in runs:
      if entry.budget == budget:
        by_group.setdefault(entry.group, []).append(entry)
    in_groups = ', '.join(
      f'{group.name} {_hours(sweep, by_group[group.name])}'
      for group in sweep.groups
      if group.name in by_group
    )
    hours = _hours(sweep, itertools.chain(*by_group.values()))
    lines.append(f'  {budget:g}: {hours} ({in_groups})')
  total = sum(entry.facts['train_flops'] for entry in runs)
  lines.append(f'  in all: {_hours(sweep, runs)} ({total:.3g} FLOPs)')
  if 'epochs' not in runs[0].facts:
    longest = max(entry.facts['tokens'] for entry in runs)
    lines.append(
      f'The longest run reads {style.quantity(longest)} tokens; nobody has'
      ' checked that the corpus holds them: say what it has by'
      ' --config.corpus_tokens.'
    )
  return '\n'.join(lines)


def _row(sweep, seeds) -> dict[str, str]:
  """Returns the cells of a size, given the runs of all its seeds, by column."""
  entry, run_facts = seeds[0], seeds[0].facts
  model = entry.config.model
  relative, epochs = (
    f'{run_facts[name]:.2f}' if name in run_facts else '-'
    for name in ('relative_flops', 'epochs')
  )
  return {
    'group': entry.group,
    'budget': f'{entry.budget:g}',
    'shape': f'{model.num_layers} x {model.width}',
    'params': style.quantity(run_facts['params']),
    'embedding': f'{run_facts["embedding_params"] / run_facts["params"]:.2f}',
    'head FLOPs': f'{run_facts["head_flops"] / run_facts["forward_flops"]:.2f}',
    'rel. FLOPs': relative,
    'steps': f'{run_facts["steps"]:,}',
    'tokens': style.quantity(run_facts['tokens']),
    'epochs': epochs,
    'rate': f'{entry.config.optimizer.learning_rate:.2e}',
    'seeds': str(len(seeds)),
    'chip-hours': _hours(sweep, seeds),
  }


def _hours(sweep, runs) -> str:
  total = sum(entry.facts['train_flops'] for entry in runs)
  hours = total / (sweep.peak_flops * sweep.utilization) / _HOUR
  return f'{hours:,.2f}' if hours < 100 else f'{hours:,.0f}'


def define_flags() -> None:
  flags.DEFINE_string('config', None, 'File that builds the sweep.')
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.', required=True)


def main(_) -> None:
  """`python -m mod_jax.sweeps plan`."""
  sweep = cli.load_config(flags.FLAGS.config, SweepConfig)
  if sweep.corpus_tokens is None:
    print(
      'counting the tokens of the corpus, for which a tokenizer may have to be'
      ' learnt: minutes, for a large one.',
      file=sys.stderr,
    )
  workdir, runs = flags.FLAGS.workdir, entries(sweep)
  digest = manifest.write(workdir, runs)
  text = table(sweep, runs)
  workdir_lib.write_text(workdir_lib.expand(workdir) / FILE, text + '\n')
  print(text)
  print(f'{workdir}/{manifest.FILE}: {digest[:12]}')


def _model(sweep, routing, shape) -> LMConfig:
  num_layers, width, num_heads = shape
  return dataclasses.replace(
    sweep.base.model,
    num_layers=num_layers,
    width=width,
    num_heads=num_heads,
    routing=routing,
  )


def _run(sweep, group, budget, shape) -> ExperimentConfig:
  """Returns the config of a run, without its name and seed."""
  base = sweep.base
  model = _model(sweep, group.routing, shape)
  steps = flops.steps_within(
    budget, model, base.train.batch_size, base.data.length
  )
  if group.without_routed_blocks:
    num_dense = model.capacities.count(None)
    if not num_dense:
      raise UserError(
        f'the group {group.name} is without_routed_blocks, but all'
        f' {shape[0]} blocks are routed: leave the group out.'
      )
    model = _model(sweep, None, (num_dense, *shape[1:]))
  rate = sweep.learning_rate * (sweep.rate_width / shape[1]) ** sweep.rate_power
  times = sweep.evaluations
  return config_lib.replace(
    base,
    {
      'model': model,
      'train.num_steps': steps,
      'optimizer.warmup_steps': int(sweep.warmup * steps),
      'evaluation.every': math.ceil(steps / (times + 1)) if times else 0,
      # Rounded, for readable configs.
      'optimizer.learning_rate': float(f'{rate * group.rate_factor:.4g}'),
    },
  )


def _expected(sweep, group, budget) -> float:
  """Returns the number of parameters that is expected to be best."""
  optimum_budget = sweep.optimum_budget or sweep.budgets[0]
  return group.optimum * (budget / optimum_budget) ** sweep.growth


def _reference(sweep, budget) -> int | None:
  """Returns `reference` of `facts`; None if no group of the sweep is dense."""
  group = next((g for g in sweep.groups if g.routing is None), None)
  if group is None:
    return None
  models = [_model(sweep, None, s) for s in group.shapes or sweep.shapes]
  expected = _expected(sweep, group, budget)
  best = min(models, key=lambda m: abs(math.log(num_params(m) / expected)))
  return flops.forward(best, sweep.base.data.length)


def _check_steps(size, budget, run_facts):
  if abs(run_facts['of_budget'] - 1) <= _TOLERANCE:
    return
  steps = run_facts['steps']
  raise UserError(
    f'the budget {budget:g} is too small for {size}: {steps} step(s) of'
    f' {run_facts["train_flops"] / steps:.3g} FLOPs miss it by more than'
    f' {_TOLERANCE:.0%}. Raise the budget, or lower base.train.batch_size,'
    ' base.data.length or the sizes.'
  )


def _corpus_tokens(sweep) -> float | None:
  """Returns how many training tokens the corpus has; None if unknown."""
  if sweep.corpus_tokens is not None:
    return sweep.corpus_tokens
  try:
    return text.num_train_tokens(sweep.base.data)
  except UserError:
    # A sweep can be planned on a machine that lacks its corpus.
    if sweep.base.data.source in ('tfds', 'prepared'):
      return None
    raise


def _check_corpus(sweep, corpus, planned):
  size, longest = max(planned, key=lambda each: each[1].facts['tokens'])
  tokens, max_epochs = longest.facts['tokens'], sweep.base.data.max_epochs
  if tokens > max_epochs * corpus:
    raise UserError(
      f'{size} reads {style.quantity(tokens)} tokens at {longest.budget:g}'
      f' FLOPs, and the corpus has {style.quantity(corpus)}, which may be seen'
      f' base.data.max_epochs={max_epochs:g} times: take larger models or a'
      ' larger corpus, or raise that.'
    )
