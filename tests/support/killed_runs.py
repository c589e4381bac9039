"""Train with the demo, kill it again and again with SIGKILL, and resume each time, until it is done.

    python tests/killed_runs.py FOLDER SEED KILLS DEMO_OPTION...

Half of the kills come from outside at a random moment of a random step; the others hit the writing of a checkpoint at
one of the points of ``WRITE_POINTS``. Runs are forked from one process that has imported everything, so that a start
costs milliseconds; nothing has run in parallel before the fork. Prints one line per kill: where, and what is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the first backward pass imports it: a second in every forked run, were it not here already

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_text
import training

WRITE_POINTS = ("half written", "before fsync", "before replace", "after replace")
MARGIN = 3  # a kill comes at most this many steps or checkpoints after the start, so that a run meets several


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(point: str, number: int) -> None:
    """Make the ``number``-th checkpoint of this process kill it at ``point``."""
    writes = 0
    real_open, real_fsync, real_replace = open, os.fsync, os.replace

    class HalfFile:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if writes == number and point == "half written":
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                die()
            return self.file.write(data)

    def counted_open(path, *args, **kwargs):
        nonlocal writes
        writes += str(path).endswith(".pt.partial")
        return HalfFile(real_open(path, *args, **kwargs))

    def fsync(descriptor):
        if writes == number and point == "before fsync":
            die()
        real_fsync(descriptor)

    def replace(source, target):
        if writes == number and point == "before replace":
            die()
        real_replace(source, target)
        if writes == number and point == "after replace":
            die()

    training.open = counted_open
    os.fsync, os.replace = fsync, replace


def announce_steps(pipe: int) -> None:
    """Write one byte at the start of each training step."""
    step = training.Run.train_step

    def announced(self):
        os.write(pipe, b".")
        step(self)

    training.Run.train_step = announced


def start(options: list[str], prepare) -> int:
    """Fork a run of the demo after ``prepare()``; returns its process number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        prepare()
        code = train_text.main(options)
    except BaseException:  # noqa: BLE001  the child must not return into the parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def was_killed(child: int) -> bool:
    """Wait; False if the run came to its end, an error if it failed."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"the demo ended with status {status}")
    return status != 0


def main(folder: str, seed: str, kills: str, *demo: str) -> int:
    """Kill, resume, and at last let it finish."""
    torch.set_num_threads(1)
    checkpoint = Path(folder) / "checkpoint-ruda.pt"
    choose = random.Random(int(seed))
    step = 0
    for kill in range(int(kills)):
        options = [*demo, "--out", folder, *(["--resume"] if checkpoint.exists() else [])]
        if kill % 2:
            point, number = choose.choice(WRITE_POINTS), choose.randint(1, MARGIN)
            where = f"checkpoint {number}, {point}"
            child = start(options, lambda point=point, number=number: die_while_writing(point, number))
        else:
            steps, delay = choose.randint(1, MARGIN), choose.uniform(0.0, 0.005)
            where = f"{delay * 1e3:.1f} ms into step {steps}"
            out, into = os.pipe()
            child = start(options, lambda into=into: announce_steps(into))
            os.close(into)
            for _ in range(steps):
                os.read(out, 1)  # empty at once if the run is over
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            os.close(out)
        if not was_killed(child):
            raise SystemExit(f"the run ended before the kill ({where}); give it more --steps")
        saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {"step": 0}
        if saved["step"] < step:
            raise SystemExit(f"a kill ({where}) took the checkpoint back from step {step} to {saved['step']}")
        step = saved["step"]
        print(f"killed {where} after the start; resuming from step {step}", flush=True)
    options = [*demo, "--out", folder, *(["--resume"] if checkpoint.exists() else [])]
    return int(was_killed(start(options, lambda: None)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
