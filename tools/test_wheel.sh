#!/usr/bin/env bash
# Installs a wheel into an environment of its own and uses it with no compiler in reach.
# Usage: tools/test_wheel.sh PYTHON WHEEL
set -euo pipefail
python=$1
wheel=$(realpath "$2")
constraints=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../constraints.txt")
folder=$(mktemp -d)
remove=$(command -v rm)  # PATH loses it below
trap '"$remove" -rf "$folder"' EXIT

"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint "$constraints" torch numpy "$wheel"

cd "$folder"  # so that nothing is imported from the source tree
export PATH="$folder/venv/bin"
unset CC CXX PYTHONPATH
for compiler in c++ g++ clang++ cc gcc; do
  if command -v "$compiler" >/dev/null; then
    echo "test_wheel.sh: $compiler is still in reach, so this would prove nothing" >&2
    exit 1
  fi
done
ruda-optim
ruda-optim check
python - <<'PROGRAM'
import torch

from ruda_torch import AdamW

model = torch.nn.Linear(8, 8)
optimizer = AdamW(model.parameters(), lr=1e-2, fused_step=True, max_grad_norm=1.0)
losses = []
for _ in range(50):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(f"trained: loss {losses[0]:.3f} to {losses[-1]:.3f}")
PROGRAM
