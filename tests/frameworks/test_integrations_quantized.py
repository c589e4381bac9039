"""States that bitsandbytes and torchao made themselves: the numbers of their own dequantization, the same next step.

Each library runs in a process of its own: both warn when they are imported, and torchao's step is compiled unless
``torch.compile`` is replaced.
"""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

COMMON = """
import sys, torch
torch.compile = lambda function=None, **_: function
sys.path.insert(0, {support!r})
import ruda_torch
from ruda_optim import memory_estimate
from ruda_torch import migration

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
SHAPES = ((64, 64), (8,), (33, 130), (3, 128, 16))

def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]

def step(optimizer, params, seed):
    # Gradients of very different sizes in one block: second moments are rounded to 0 beside first moments that are not.
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        scale = torch.exp(3.0 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(99)))
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    optimizer.step()

def check_moments(converted, index, first, second):
    state = converted["state"][index]
    assert state["exp_avg_sq"].dtype is torch.float32 and torch.equal(state["exp_avg_sq"], second)
    kept = second != 0
    assert torch.equal(state["exp_avg"], torch.where(kept, first, torch.zeros_like(first)))
    return int((~kept & (first != 0)).sum())

def check_next_step(peer, params, converted):
    # Same state, same gradient: a peer errs by up to 4 u / (1 - beta) where it forms 1 - beta in FP32: 400 u for v,
    # half of it after the root, and 40 u for m, as in tests/optimizer/test_migration.py; m may be a difference of
    # larger numbers, hence 600 u of the update. Where v = 0 made m = 0, the steps differ on purpose.
    mine = [torch.nn.Parameter(p.detach().clone()) for p in params]
    start = [p.detach().clone() for p in params]
    ours = ruda_torch.AdamW(mine, fused_step=True)
    ours.load_state_dict(converted)
    assert ours.param_groups[0]["weight_decay"] == 0.1
    kept = [entry["exp_avg_sq"] != 0 for entry in converted["state"].values()]
    step(peer, params, 50)
    step(ours, mine, 50)
    u = 2.0**-24
    for a, b, where, old in zip(mine, params, kept, start):
        far = (a - b).abs() - 600 * u * (b - old).abs() - 4 * u * b.abs()
        assert where.float().mean() > 0.2 and torch.all(far[where] <= 0), (where.float().mean(), far[where].max())

def check_memory(name, moments, elements):
    (row,) = (r for r in memory_estimate.estimate_others() if r.optimizer == name)
    assert float(row.moments) == moments / elements, (row.moments, moments / elements)
"""

BITSANDBYTES = """
import bitsandbytes
from bitsandbytes import functional
for name in ("AdamW8bit", "PagedAdamW8bit", "AdamW"):
    params = parameters()
    options = {"optim_bits": 8} if name == "AdamW" else {}
    peer = getattr(bitsandbytes.optim, name)(params, **HYPER, **options)
    for seed in range(5):
        step(peer, params, seed)
    saved = peer.state_dict()
    converted = migration.from_bitsandbytes(saved)
    for index, parameter in enumerate(params):
        held = peer.state[parameter]
        moments = []
        for number in "12":
            if held["state1"].dtype is torch.float32:
                moments.append(held["state" + number])
            else:
                moments.append(functional.dequantize_blockwise(
                    held["state" + number], absmax=held["absmax" + number], code=held["qmap" + number], blocksize=256))
        check_moments(converted, index, *moments)
        assert converted["state"][index]["step"] == 5
    # Its CPU kernel writes no code 0 for these second moments; torchao does, below.
    held = [peer.state[params[0]][n] for n in ("state1", "state2", "absmax1", "absmax2")]
    check_memory("bitsandbytes AdamW8bit", sum(h.nbytes for h in held), 4096)
    check_next_step(peer, params, converted)
    # Blocks of 2,048, as before version 0.44.
    moment = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    old = {"step": 3}
    expected = []
    for number, signed, value in (("1", True, moment), ("2", False, moment.square())):
        code = functional.create_dynamic_map(signed=signed)
        codes, state = functional.quantize_blockwise(value, code=code, blocksize=2048)
        old |= {"state" + number: codes, "qmap" + number: code, "absmax" + number: state.absmax}
        expected.append(functional.dequantize_blockwise(codes, state))
    group = {**saved["param_groups"][0], "params": [0]}
    check_moments(migration.from_bitsandbytes({"state": {0: old}, "param_groups": [group]}), 0, *expected)
"""

TORCHAO = """
import io
import torchao.optim
for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    params = parameters()
    peer = getattr(torchao.optim, name)(params, **HYPER)
    for seed in range(5):
        step(peer, params, seed)
    file = io.BytesIO()
    torch.save(peer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    converted = migration.from_torchao(saved)
    repaired = 0
    for index, parameter in enumerate(params):
        held = [peer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
        repaired += check_moments(converted, index, *(h.dequantize() if hasattr(h, "codes") else h for h in held))
    assert (repaired > 100) is (name != "AdamW4bit"), repaired  # whose map of second moments has no 0
    held = [peer.state[params[0]][name] for name in ("exp_avg", "exp_avg_sq")]
    check_memory("torchao " + name.replace("Fp8", "8bit"), sum(h.codes.nbytes + h.scale.nbytes for h in held), 4096)
    check_next_step(peer, params, converted)
    try:
        ruda_torch.AdamW(parameters(), fused_step=True).load_state_dict(saved)
    except ValueError as error:
        assert "load ruda_torch.migration.from_torchao(state_dict)" in str(error)
    else:
        raise AssertionError("loaded as it is")
"""


@pytest.mark.parametrize(("package", "code"), [("bitsandbytes", BITSANDBYTES), ("torchao", TORCHAO)])
def test_state_of_the_library_itself(package, code) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-integrations)")
    common = COMMON.replace("{support!r}", repr(str(pathlib.Path(__file__).parents[1] / "support")))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", common + code],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
