"""Studies of language models against counting by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
import tiny

from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.routed import Layer
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import TokenInfo
from mod_jax.models.lm import LMConfig, LMOutput
from mod_jax.studies import language
from mod_jax.tasks import make_task

pytestmark = pytest.mark.slow

MODEL = LMConfig(
  num_layers=4,
  width=8,
  num_heads=2,
  routing=MoDConfig(capacity=0.25, router_loss=0.01),
)


def test_entropy_by_blocks(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  for i in range(12):
    text = ''.join(rng.choice(list('abc \n'), 99))
    (tmp_path / f'{i}.txt').write_text(text)
  files = {'source': 'files', 'files': f'{tmp_path}/*.txt'}
  data = TextDataConfig(length=16, eval_fraction=0.5, **files)
  sizes = {'evaluation.batch_size': 4, 'evaluation.final_batches': 64}
  config = tiny.experiment(MODEL, data, **sizes)
  task = make_task(config)
  params = tiny.random_params(MODEL, mean=0.1, std=0.5)
  params = jax.tree.map(jnp.asarray, params)
  monkeypatch.setattr(language, '_OFTEN', 3)
  study = task.studies()['engagement'](params, {}, None)

  apply = jax.jit(MODEL.build().apply)
  counts, entropies = [], []
  for batch in task.modality.eval_batches(batch_size=4, num_batches=16):
    valid_BL = batch['weights'] > 0
    output = apply({'params': params}, batch['tokens'], valid_BL=valid_BL)
    p_BLV = np.asarray(jax.nn.softmax(output.logits_BLV), np.float64)
    entropies.append(-(p_BLV * np.log(p_BLV)).sum(axis=-1)[valid_BL])
    count_BL = sum(np.asarray(r.chosen_BL).astype(int) for r in output.routing)
    counts.append(count_BL[valid_BL])
  count_N, entropy_N = map(np.concatenate, (counts, entropies))
  assert set(count_N) == {0, 1, 2}
  found = study.metrics
  assert found['tokens'] == len(count_N)
  assert found['spearman'] == pytest.approx(
    stats.spearmanr(count_N, entropy_N).statistic, abs=1e-3
  )
  low, high = found['interval']
  assert low < found['spearman'] < high
  for k in range(3):
    mine = entropy_N[count_N == k]
    assert found['blocks'][str(k)]['share'] == len(mine) / len(count_N)
    assert found['blocks'][str(k)]['entropy'] == pytest.approx(
      mine.mean(), rel=1e-5
    )
  assert set(found['pieces']) <= set('abc␣↵')
  study.figures['entropy'].canvas.draw()
  _check_ranks(task, params)
  _check_influence(task, params)
  _check_copying(task, params, monkeypatch)
  dense = dataclasses.replace(config, model=MODEL.dense_twin())
  assert set(make_task(dense).studies()) == {'arank', 'copying', 'influence'}
  # A loaded model, on data that are given.
  run = tiny.run(dense)
  other = dataclasses.replace(data, length=8)
  task = make_task(dataclasses.replace(dense, data=other))
  found, at_first = (run.study('influence', x).metrics for x in (other, None))
  wanted = task.studies()['influence'](run.variables['params'], {}, None)
  assert found['influence'] == pytest.approx(wanted.metrics['influence'])
  assert found['influence'] != at_first['influence']
  with pytest.raises(UserError, match="unknown study 'ranks'.*'arank'"):
    run.study('ranks')


def _check_copying(task, params, monkeypatch):
  study = task.studies()['copying'](params, {}, None)
  totals_2L, apply = np.zeros((2, 16)), jax.jit(MODEL.build().apply)
  of_new, of_seen = [], []
  for batch in task.modality.eval_batches(batch_size=4, num_batches=None):
    weight_BL = batch['weights']
    output = apply({'params': params}, batch['tokens'], valid_BL=weight_BL > 0)
    p_BLV = np.asarray(jax.nn.softmax(output.logits_BLV), np.float64)
    of_BL1 = np.asarray(batch['targets'])[..., None]
    loss_BL = -np.log(np.take_along_axis(p_BLV, of_BL1, axis=-1)[..., 0])
    totals_2L += (loss_BL * weight_BL).sum(axis=0), weight_BL.sum(axis=0)
    for b, t in zip(*np.nonzero(weight_BL), strict=True):
      seen = batch['tokens'][b, t] in batch['tokens'][b, :t]
      (of_seen if seen else of_new).append(loss_BL[b, t])
  loss_8, weight_8 = totals_2L.reshape(2, 8, 2).sum(axis=-1)
  np.testing.assert_allclose(study.metrics['loss'], loss_8 / weight_8, 1e-4)
  found = [study.metrics[k] for k in ('after_new', 'after_seen', 'share_new')]
  share = len(of_new) / weight_8.sum()
  expected = [np.mean(of_new), np.mean(of_seen), share]
  np.testing.assert_allclose(found, expected, 1e-4)

  def copy(params, model_state, batch, key, mode):
    """Foretells what came 7 tokens ago, once the first token has come again."""
    seen_BL = jnp.roll(batch['tokens'], 7, axis=1)
    logits_BLV = 50.0 * jax.nn.one_hot(seen_BL, 256)
    logits_BLV = logits_BLV.at[:, :8].set(0.0)
    return LMOutput(logits_BLV=logits_BLV)

  monkeypatch.setattr(task, 'apply', copy)
  study = task.studies()['copying'](params, {}, None)
  assert study.metrics['first'] == pytest.approx(np.log(256))
  assert study.metrics['second'] < 1e-6


def test_rows_too_short_to_copy_in_are_refused():
  task = make_task(tiny.experiment(MODEL, TextDataConfig(length=7)))
  with pytest.raises(UserError, match='data.length=7: expected at least 8'):
    language.copying(task, {}, {})


def _check_ranks(task, params):
  """Where queries are 0, all keys weigh the same; large ones see one key."""
  params = jax.tree.map(lambda x: x, params)
  for block, factor in ((0, 0), (1, 1e3), (2, 1e3), (3, 0)):
    query = params[f'block_{block}']['attention']['query']
    query['kernel'] = factor * query['kernel']
  study = task.studies()['arank'](params, {}, None)
  assert study.metrics['tokens'] == [16, 4, 16, 4]
  assert study.metrics['samples'] > 4
  even, peaked, sharp, few = study.metrics['rank']
  assert (even, few) == (15, 3)
  assert study.metrics['share'] == pytest.approx([1, peaked / 3, sharp / 15, 1])
  assert peaked < 3
  assert sharp < 15
  # As many as are routed.
  assert study.metrics['suggested'] == [1, 2]
  # All tokens enter the attention of blocks whose feed-forward is routed.
  config = config_lib.replace(task.config, {'model.routing.part': 'mlp'})
  other = config.model.build().init(jax.random.key(0), config.model.example())
  study = make_task(config).studies()['arank'](other['params'], {}, None)
  assert study.metrics['tokens'] == [16] * 4


def _check_influence(task, params):
  """An idle block has none; the first block's is computed by hand."""
  idle = jax.tree.map(lambda x: x, params)
  for part, name in (('attention', 'out'), ('mlp', 'down')):
    kernel = idle['block_2'][part][name]['kernel']
    idle['block_2'][part][name]['kernel'] = 0 * kernel
  study = task.studies()['influence'](idle, {}, None)
  first, _, none, _ = study.metrics['influence']
  assert none == pytest.approx(0, abs=1e-6)
  assert first > 1e-3
  assert 2 in study.metrics['suggested']
  assert len(study.metrics['suggested']) == 2
  total, count = 0.0, 0
  config = dataclasses.replace(MODEL.dense_twin(), num_layers=1)
  embedding_VD = np.asarray(params['embedding'], np.float64)
  layer = Layer(config.stack.layers[0])
  for batch in task.modality.eval_batches(batch_size=4, num_batches=64):
    tokens_BL, valid_BL = batch['tokens'], batch['weights'] > 0
    x_BLD = embedding_VD[tokens_BL]
    info = TokenInfo(
      jnp.broadcast_to(jnp.arange(16), tokens_BL.shape), valid_BL
    )
    y_BLD = layer.apply({'params': params['block_0']}, x_BLD, info).x_BLD
    norms_BL = np.linalg.norm(x_BLD, axis=-1) * np.linalg.norm(y_BLD, axis=-1)
    cosine_BL = (x_BLD * y_BLD).sum(axis=-1) / norms_BL
    total += (1 - cosine_BL)[valid_BL].sum()
    count += valid_BL.sum()
  assert first == pytest.approx(float(total / count), rel=1e-4)
  assert study.metrics['tokens'] == count


def test_the_rank_of_a_map_without_its_diagonal():
  length = 6
  q_LHC = np.zeros((length, 4, 2), np.float32)
  k_LGC = np.zeros((length, 2, 2), np.float32)
  seen_LS = np.tri(length, dtype=bool)
  # Even weights: row i has i equal entries.
  assert language.mean_rank(q_LHC, k_LGC, seen_LS) == length - 1
  # Two of the heads, those of the first keys, see the first token alone.
  q_LHC[:, :2] = 10
  k_LGC[0, 0] = 10
  assert language.mean_rank(q_LHC, k_LGC, seen_LS) == (length - 1 + 1) / 2
  # Two documents of three tokens each.
  segment_L = np.arange(length) // 3
  seen_LS &= segment_L[:, None] == segment_L
  assert language.mean_rank(0 * q_LHC, k_LGC, seen_LS) == 4
  # A window of the token itself and the one before it.
  seen_LS = np.tri(length, dtype=bool) & ~np.tri(length, k=-2, dtype=bool)
  assert language.mean_rank(0 * q_LHC, k_LGC, seen_LS) == length - 1
  assert language.mean_rank(q_LHC[:1], k_LGC[:1], seen_LS[:1, :1]) == 0


def test_the_interval_knows_that_a_rows_tokens_are_not_independent():
  """Where rows are constant, the tokens of a row tell no more than one."""
  rng = np.random.default_rng(1)
  x_R, y_R = rng.normal(size=(2, 60))
  valid_RL = np.ones((60, 50), bool)
  wide = language.correlation(
    *(np.repeat(x[:, None], 50, axis=1) for x in (x_R, y_R)), valid_RL
  )
  narrow = language.correlation(*rng.normal(size=(2, 60, 50)), valid_RL)
  assert wide[2] - wide[1] > 4 * (narrow[2] - narrow[1])
  assert wide[0] == pytest.approx(stats.spearmanr(x_R, y_R).statistic)
  # Padding, whatever it holds, changes nothing.
  x_RL, y_RL = rng.normal(size=(2, 60, 50))
  valid_RL[:, 30:] = False
  want = language.correlation(x_RL[:, :30], y_RL[:, :30], valid_RL[:, :30])
  x_RL[:, 30:] = 99
  assert language.correlation(x_RL, y_RL, valid_RL) == pytest.approx(want)
  constant = language.correlation(0 * x_RL, y_RL, valid_RL)
  assert np.isnan(constant).all()
