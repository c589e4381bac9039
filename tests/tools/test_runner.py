"""The regression runner: what it would run, how it judges, what it writes down. The suites themselves run elsewhere."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from xml.sax.saxutils import quoteattr

import pytest
import torch

import run_adamw_regressions as runner
from fused_adamw import execute, suites, without_torch
from fused_adamw.execute import BLOCKED, FAILED, INTERRUPTED, PASSED, TIMEOUT, Outcome, Task
from result_variables import result_variables

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTHING_MISSING = dict.fromkeys(
    ("torch", "numpy", "pytest", "triton", "package", "operator", "nvrtc compiler", "simulator", "gpu", "nvrtc", "ptx",
     "torch of the fixtures")
)  # fmt: skip


def python(code: str, **options) -> Task:
    return Task("fake", "a task", (sys.executable, "-c", code), **options)


def run(task: Task, timeout: float = 60.0, **missing) -> Outcome:
    return execute.run(task, {**NOTHING_MISSING, **missing}, timeout, execute.Stop())


# ----------------------------------------------------------------------------------------------------- what would run


def dry_run(capsys, *words: str) -> str:
    assert runner.main(["--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_dry_run_prints_every_command_and_runs_nothing(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    printed = dry_run(capsys, "--suite", "all", "--report", str(tmp_path / "report.json"))
    for suite in suites.SUITES:
        assert f"\n{suite}: " in f"\n{printed}"
    assert "python tools/fused_adamw/oracle.py --check\n" in printed
    assert "TRITON_INTERPRET=1 python -m pytest" in printed
    assert "commands; nothing was run" in printed
    assert str(ROOT) not in printed
    assert not list(tmp_path.iterdir())


def test_without_arguments_all_suites_that_need_no_gpu(capsys) -> None:
    printed = dry_run(capsys)
    names = {line.partition(":")[0] for line in printed.splitlines() if re.match(r"\w+: ", line)}
    assert names == {"oracle", "reference", "host", "build", "simulate"}


def test_options_reach_the_commands(capsys) -> None:
    printed = dry_run(capsys, "--suite", "bench", "--elements", "4096", "--iterations", "3", "--samples", "4",
                      "--dtype", "bf16", "--amsgrad", "--report", "somewhere/x.json")  # fmt: skip
    assert "--device cpu --elements 4096 --dtype bf16 --iterations 3 --samples 4 --amsgrad" in printed
    assert "somewhere/x-bench-cpu.json" in printed
    assert "--compiler" not in printed, "a CPU has no compiler to choose"
    for device in (["--device", "cuda"], []):
        printed = dry_run(capsys, "--suite", "bench", *device, "--compiler", "ptx")
        assert printed.count("bench.py") == 1
        assert "--device cuda" in printed
        assert "--compiler ptx" in printed
    printed = dry_run(capsys, "--suite", "bench", "--compiler", "both")
    assert "--device cpu" not in printed, "who names a compiler does not want to measure the CPU operator"
    assert printed.count("--device cuda") == 2


@pytest.mark.parametrize(("given", "meant"), [("f32", "fp32"), ("f16", "fp16"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_dtypes_have_their_short_names_too(given, meant, capsys) -> None:
    assert f"--dtype {meant} " in dry_run(capsys, "--suite", "bench", "--dtype", given)


@pytest.mark.parametrize("compiler", ["nvrtc", "ptx"])
def test_one_compiler_leaves_the_other_out(compiler, capsys) -> None:
    other = {"nvrtc": "ptx", "ptx": "nvrtc"}[compiler]
    printed = dry_run(capsys, "--suite", "build", "--suite", "simulate", "--compiler", compiler)
    tool = {"nvrtc": "aot_nvrtc.py --arch", "ptx": "aot_triton.py --target"}
    assert f"{tool[compiler]} sm_90" in printed
    assert tool[other] not in printed
    assert printed.count("simulation:") == 1
    cuda = dry_run(capsys, "--suite", "cuda", "--compiler", compiler, "--dtype", "fp16")
    assert f"-k 'not {other} and not fp32 and not bf16'" in cuda


def test_build_covers_every_target() -> None:
    named = {(task.compiler, word) for task in suites.build(suites.Choice()) for word in task.command}
    for target in ("sm_80", "sm_90", "sm_100"):
        assert {("nvrtc", target), ("ptx", target)} <= named
    assert ("ptx", "gfx942") in named


def test_every_file_that_a_suite_names_exists() -> None:
    tasks = suites.tasks(list(suites.SUITES), suites.Choice(device="cuda"))
    words = [word for task in tasks for word in task.command if word.startswith(("tests/", "tools/"))]
    assert len(words) > 20
    assert [word for word in words if not (ROOT / word).is_file()] == []


def test_every_test_of_what_we_compute_is_in_a_suite() -> None:
    named = {word for task in suites.tasks(list(suites.SUITES), suites.Choice(device="cuda")) for word in task.command}
    files = {
        str(path.relative_to(ROOT))
        for room in ("functional", "kernels", "optimizer")
        for path in (ROOT / "tests" / room).glob("test_*.py")
    }
    # Random and long runs; other packages' optimizers; the tools that compile, whose results the suite `build` checks.
    # cuda_rehearsal is the suite `cuda` on the simulator.
    outside = {
        "cuda_rehearsal",
        "killed_run",
        "properties",
        "property_runs",
        "migration",
        "nvrtc_compiler",
        "nvrtc_launch",
        "ptx",
    }
    assert {pathlib.Path(name).stem.removeprefix("test_") for name in files - named} == outside


@pytest.mark.parametrize(
    "words", [["--suite", "everything"], ["--elements", "0"], ["--timeout", "0"], ["--dtype", "x"], ["--samples", "2"]]
)
def test_a_wrong_command_line_is_exit_code_2(words, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        runner.main(words)
    assert stopped.value.code == 2


# ----------------------------------------------------------------------------------------------------------- statuses


def test_a_command_passes_or_fails_by_its_exit_code() -> None:
    good, bad = run(python("print('fine')")), run(python("print('alas'); raise SystemExit(3)"))
    assert (good.status, good.returncode, good.log) == (PASSED, 0, "fine\n")
    assert (bad.status, bad.returncode, bad.reason) == (FAILED, 3, "exit code 3: alas")


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path) -> None:
    proof = tmp_path / "proof"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(proof)!r}).touch()"
    parent = f"import subprocess, sys; print('began'); subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(python(parent), timeout=1.5)
    assert (outcome.status, outcome.returncode) == (TIMEOUT, None)
    assert outcome.log == "began\n"
    assert outcome.duration < 4
    time.sleep(max(0.0, 5 - outcome.duration))
    assert not proof.exists(), "what the command started went on"


def test_what_a_finished_command_left_running_is_ended(tmp_path) -> None:
    proof = tmp_path / "proof"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(proof)!r}).touch()"
    outcome = run(python(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"))
    assert outcome.status == PASSED
    time.sleep(3)
    assert not proof.exists()


def test_a_command_that_ignores_the_signal_is_ended_with_its_child(tmp_path) -> None:
    """The parent ends at SIGTERM; its child does not listen."""
    proof = tmp_path / "proof"
    child = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('deaf', flush=True)
time.sleep(4)
pathlib.Path({str(proof)!r}).touch()
"""
    outcome = run(python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"), timeout=2)
    assert outcome.log == "deaf\n"
    time.sleep(max(0.0, 5 - outcome.duration))
    assert not proof.exists()


def test_a_missing_tool_blocks_and_runs_nothing(tmp_path) -> None:
    proof = tmp_path / "proof"
    task = python(f"import pathlib; pathlib.Path({str(proof)!r}).touch()", needs=("triton",))
    outcome = run(task, triton="Triton is not installed")
    assert (outcome.status, outcome.reason) == (BLOCKED, "Triton is not installed")
    assert not proof.exists()


def test_a_missing_gpu_is_a_failure_where_a_gpu_is_the_point() -> None:
    outcome = run(python("", gpu=True, needs=("nvrtc",)), gpu="needs a GPU", nvrtc="no NVRTC")
    assert outcome.status == FAILED
    assert outcome.reason == "the suite 'fake' needs a GPU; run it where there is one, or leave it out"


def test_variables_of_a_task(monkeypatch) -> None:
    monkeypatch.setenv("GONE", "1")
    code = "import os; print(os.environ.get('GONE'), os.environ['NEW'], os.environ.get('PIP_NO_INDEX'))"
    task = python(code, environment={"GONE": None, "NEW": "2"})
    assert run(task).log == "None 2 None\n"
    assert execute.run(task, NOTHING_MISSING, 60, execute.Stop(), offline=True).log == "None 2 1\n"
    code = "import urllib.request; urllib.request.urlopen('http://example.com', timeout=20)"
    outcome = execute.run(python(code), NOTHING_MISSING, 60, execute.Stop(), offline=True)
    assert outcome.status == FAILED
    assert "refused" in outcome.reason


# --------------------------------------------------------------------------------------------- pytest, test by test


def judged(tmp_path: pathlib.Path, cases: dict[str, str], returncode: int = 0, may_skip=()) -> Outcome:
    """The judgement over results: by test name, ``passed``, ``failed``, or the reason of a skip."""
    inner = {PASSED: "", FAILED: '<failure message="no"/>'}
    lines = [f"<testcase name={quoteattr(name)}>{inner.get(what, f'<skipped message={quoteattr(what)}/>')}</testcase>"
             for name, what in cases.items()]  # fmt: skip
    results = tmp_path / "results.xml"
    results.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    outcome = Outcome(python("", pytest=True, may_skip=may_skip), PASSED, returncode=returncode)
    execute.judge_tests(outcome, results)
    return outcome


def test_skips_block_unless_the_task_allows_their_reason(tmp_path) -> None:
    cases = {"one": PASSED, "two": "needs 34 GiB of free device memory"}
    outcome = judged(tmp_path, cases)
    assert outcome.status == BLOCKED
    assert outcome.reason == "1 tests could not run: needs 34 GiB of free device memory"
    outcome = judged(tmp_path, cases, may_skip=("free device memory",))
    assert (outcome.status, outcome.reason) == (PASSED, "1 tests, 1 skipped")
    assert outcome.skipped == {"needs 34 GiB of free device memory": 1}
    assert judged(tmp_path, {"two": cases["two"]}, may_skip=("memory",)).status == BLOCKED, "nothing ran"


def test_failures_outweigh_everything_and_are_named(tmp_path) -> None:
    outcome = judged(tmp_path, {"a": PASSED, "b": FAILED, "c": "no tool"}, returncode=1)
    assert (outcome.status, outcome.reason) == (FAILED, "1 of 3 tests failed: b")
    assert judged(tmp_path, {"a": PASSED}, returncode=2).status == FAILED, "pytest itself was interrupted"
    assert judged(tmp_path, {}, returncode=5).status == FAILED, "nothing was collected"


def test_each_dtype_has_a_status_of_its_own(tmp_path) -> None:
    cases = {"case[nvrtc-fp32 1025]": PASSED, "case[nvrtc-fp16 1025]": FAILED, "streams[nvrtc]": PASSED}
    outcome = judged(tmp_path, cases, returncode=1)
    rows = outcome.rows("NVIDIA H200")
    assert {row["dtype"]: row["status"] for row in rows} == {None: FAILED, "fp32": PASSED, "fp16": FAILED}
    assert {row["device"] for row in rows} == {"cpu"}


def test_the_names_of_cases_tell_the_gradients_dtype(tmp_path) -> None:
    results = {"x[float16 parameter, float32 gradient]": PASSED, "x[scale 8, bfloat16 gradient]": PASSED,
               "x[gradient is every second column, float16]": FAILED, "x[betas near 1]": FAILED}  # fmt: skip
    outcome = judged(tmp_path, results, returncode=1)
    assert outcome.by_dtype == {"fp32": PASSED, "fp16": FAILED, "bf16": PASSED}


def test_a_real_pytest_process(tmp_path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\ndef test_good(): pass\n@pytest.mark.skip(reason='no tool')\ndef test_two(): pass\n")
    outcome = run(Task("fake", "tests", suites.pytest(str(file)), pytest=True))
    assert (outcome.status, outcome.reason) == (BLOCKED, "1 tests could not run: no tool")
    assert outcome.tests == {PASSED: 1, BLOCKED: 1}
    outcome = run(Task("fake", "tests", suites.pytest(str(tmp_path / "nowhere.py")), pytest=True))
    assert outcome.status == FAILED


def test_tests_are_collected_without_the_plugins_that_happen_to_be_installed() -> None:
    """As the suites do it; this file has a fixture that its tests share, which matters to xdist alone."""
    command = suites.pytest("--collect-only", "tests/kernels/test_fixtures.py")
    outcome = run(Task("fake", "tests", command, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}))
    assert outcome.status == PASSED, outcome.log
    assert "32 tests collected" in outcome.log


# --------------------------------------------------------------------------------------------- exit codes and report


@pytest.fixture
def fake(monkeypatch):
    """Puts tasks in the place of the suite ``oracle`` and an answer in the place of the probe's."""

    def put(*tasks: Task, **missing: str) -> None:
        found = {"missing": {**NOTHING_MISSING, **missing}, "environment": {"gpu": None, "versions": {"torch": "9"}}}
        monkeypatch.setattr(execute, "probe", lambda stop: found)
        monkeypatch.setitem(suites.SUITES, "oracle", lambda choice: list(tasks))

    return put


GOOD, BAD, SLOW = python("print('ok')"), python("raise SystemExit(1)"), python("import time; time.sleep(60)")
NEEDY = python("", needs=("triton",))


@pytest.mark.parametrize(
    ("tasks", "code"),
    [([GOOD], 0), ([GOOD, BAD], 1), ([GOOD, NEEDY], 3), ([NEEDY], 3), ([SLOW, GOOD], 4), ([SLOW, NEEDY], 4),
     ([NEEDY, SLOW, BAD, GOOD], 1)],
)  # fmt: skip
def test_exit_codes(tasks, code, fake, tmp_path, capsys) -> None:
    fake(*tasks, triton="no Triton")
    timeout = "1" if SLOW in tasks else "60"
    words = ["--suite", "oracle", "--timeout", timeout, "--report", str(tmp_path / "report.json")]
    assert runner.main(words) == code
    status = json.loads((tmp_path / "report.json").read_text())["status"]
    assert execute.EXIT_CODES[status] == code
    assert f"{status}; report: " in capsys.readouterr().out


def test_a_budget_ends_the_run_and_says_what_was_not_started(fake, tmp_path) -> None:
    fake(SLOW, GOOD)
    report = tmp_path / "report.json"
    assert runner.main(["--suite", "oracle", "--budget", "1", "--report", str(report)]) == execute.EXIT_CODES[TIMEOUT]
    first, second = json.loads(report.read_text())["tasks"]
    assert first["reason"] == "still running after 1 s"
    assert second["reason"] == "not started: the time for all tasks is over"


def test_a_report_holds_what_was_run_and_names_no_place_of_this_machine(fake, tmp_path) -> None:
    simulated = python("print('simulated')", device="simulation on a CPU", compiler="ptx", simulation=True)
    fake(python(f"print({str(ROOT / 'src')!r})", environment={"TRITON_INTERPRET": "1"}), simulated, NEEDY,
         triton="no Triton")  # fmt: skip
    path = tmp_path / "report.json"
    runner.main(["--suite", "oracle", "--offline", "--report", str(path)])
    text = path.read_text()
    assert str(ROOT) not in text
    assert sys.prefix not in text
    report = json.loads(text)
    assert (report["format"], report["complete"], report["status"]) == (1, True, BLOCKED)
    assert report["environment"]["versions"] == {"torch": "9"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["environment"]["date"])
    assert report["environment"]["command"].startswith("python tools/run_adamw_regressions.py --suite oracle --offline")
    assert report["missing"] == {"triton": "no Triton"}
    assert report["options"]["offline"] is True
    for name in (
        "src/ruda_optim/fused_adamw/kernels/csrc/adamw_update.h",
        "tests/support/cases.py",
        "tools/fused_adamw/suites.py",
    ):
        assert report["sources"][name] == hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    first, second, third = report["tasks"]
    assert first["command"].startswith("python -c print(")
    assert first["environment"] == {"TRITON_INTERPRET": "1"}
    assert (first["log"], first["exit code"], first["simulation"]) == ("./src\n", 0, False)
    assert first["duration s"] > 0
    assert second["simulation"] is True
    assert (third["status"], third["exit code"], third["log"]) == (BLOCKED, None, "")
    assert [(row["device"], row["compiler"], row["simulation"]) for row in report["runs"]] == [
        ("cpu", None, False), ("simulation on a CPU", "ptx", True), ("cpu", None, False)]  # fmt: skip


def test_what_changes_a_result_is_written_down(fake, tmp_path, monkeypatch, capsys) -> None:
    given = {"RUDA_PTX_VERSION": "8.6", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2",
             "OPENBLAS_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "PYTORCH_ALLOC_CONF": "x:1"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HARMLESS", "1")
    fake(python("import os; print(os.environ.get('RUDA_PTX_VERSION'))", environment={"TRITON_INTERPRET": None}))
    path = tmp_path / "report.json"
    assert runner.main(["--suite", "oracle", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    assert given.items() <= report["environment"]["variables"].items()
    assert "HARMLESS" not in report["environment"]["variables"]
    assert report["tasks"][0]["log"] == "8.6\n"
    assert report["tasks"][0]["environment"] == {"TRITON_INTERPRET": None}
    assert "TRITON_INTERPRET=1 is set here, and is taken away for this task" in capsys.readouterr().out


def test_no_suite_takes_a_setting_of_ours_away() -> None:
    tasks = suites.tasks(list(suites.SUITES), suites.Choice(device="cuda"))
    assert not [task.name for task in tasks for name in task.environment if name.startswith("RUDA_")]


def test_variables_name_no_place_of_this_machine(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/src:{pathlib.Path.home()}/more")
    assert result_variables()["PYTHONPATH"] == "./src:~/more"


def test_an_existing_report_is_kept(fake, tmp_path) -> None:
    fake(GOOD)
    wanted = tmp_path / "report.json"
    wanted.write_text("mine")
    (tmp_path / "report-2-bench-cpu.json").write_text("numbers of another run")
    for expected in ("report-3.json", "report-4.json"):
        assert runner.main(["--suite", "oracle", "--report", str(wanted)]) == 0
        assert json.loads((tmp_path / expected).read_text())["options"]["report"] == expected
    assert wanted.read_text() == "mine"
    assert not (tmp_path / "report-2.json").exists()


def test_a_report_is_there_while_the_run_goes_on(fake, tmp_path, monkeypatch) -> None:
    """Before the probe, which takes seconds, and during a task."""
    path = tmp_path / "report.json"
    fake(python(f"print(open({str(path)!r}).read())"))
    answer, seen = execute.probe, []
    monkeypatch.setattr(execute, "probe", lambda stop: (seen.append(json.loads(path.read_text())), answer(stop))[1])
    assert runner.main(["--suite", "oracle", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    seen.append(json.loads(report["tasks"][0]["log"]))
    assert [(entry["status"], entry["complete"], entry["running"]) for entry in [*seen, report]] == [
        ("running", False, None), ("running", False, "fake: a task"), (PASSED, True, None)]  # fmt: skip


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_runner_its_children_and_the_report(name, tmp_path) -> None:
    """Of a real runner whose first task is a process with a child."""
    report, proof, began = (tmp_path / name for name in ("report.json", "proof", "began"))
    touch = [f"pathlib.Path({str(path)!r}).touch()" for path in (began, proof)]
    child = f"import pathlib, time; {touch[0]}; time.sleep(3); {touch[1]}"
    parent = f"import subprocess, sys; print('so far', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
import run_adamw_regressions as runner
from fused_adamw import execute, suites
task = execute.Task("fake", "first", (sys.executable, "-c", {parent!r}))
execute.probe = lambda stop: {{"missing": {{"gpu": None}}, "environment": {{}}}}
suites.SUITES["oracle"] = lambda choice: [task, task]
sys.exit(runner.main(["--suite", "oracle", "--report", {str(report)!r}]))
"""
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not began.exists():
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.05)
        assert json.loads(report.read_text())["status"] == "running"
        number = getattr(signal, name)
        running.send_signal(number)
        printed, _ = running.communicate(timeout=20)
    finally:
        running.kill()
    ended = time.monotonic()
    assert running.returncode == 128 + number
    assert f"{INTERRUPTED} (ended by {name}); report: " in printed
    left = json.loads(report.read_text())
    assert (left["status"], left["complete"], left["reason"]) == (INTERRUPTED, False, f"ended by {name}")
    assert [(task["status"], task["log"]) for task in left["tasks"]] == [(INTERRUPTED, "so far\n")]
    time.sleep(max(0.0, 4 - (time.monotonic() - ended)))
    assert not proof.exists(), "what the task started went on"


def test_an_error_of_the_runner_itself_is_in_the_report(fake, tmp_path, monkeypatch) -> None:
    fake(GOOD, GOOD)
    path = tmp_path / "report.json"
    monkeypatch.setattr(execute, "obstacle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.main(["--suite", "oracle", "--report", str(path)])
    report = json.loads(path.read_text())
    assert (report["status"], report["complete"]) == (INTERRUPTED, False)
    assert report["reason"] == "ZeroDivisionError: division by zero"


def test_the_probe_ends_when_the_runner_is_told_to() -> None:
    stop = execute.Stop()
    stop.signal = signal.SIGTERM
    assert execute.probe(stop) is None


def test_a_long_log_keeps_both_ends() -> None:
    text = "a" * execute.LOG_CHARACTERS + "b" * execute.LOG_CHARACTERS
    kept = execute.shortened(text)
    assert len(kept) < execute.LOG_CHARACTERS + 100
    assert (kept[0], kept[-1]) == ("a", "b")
    assert f"{execute.LOG_CHARACTERS} characters left out" in kept


# --------------------------------------------------------------------------------------------------- on this machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: the suite would run")
@pytest.mark.parametrize("suite", ["cuda", "bench"])
def test_a_suite_that_needs_a_gpu_fails_here_and_says_so_once(suite, tmp_path) -> None:
    path = tmp_path / "r.json"
    command = [sys.executable, "tools/run_adamw_regressions.py", "--suite", suite, "--compiler", "both"]
    done = subprocess.run([*command, "--report", str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    sentence = rf"the suite '{suite}' needs a GPU that torch can use, and this machine has none: torch .*; run it where"
    assert len(re.findall(sentence, done.stdout)) == 1
    report = json.loads(path.read_text())
    assert report["status"] == FAILED
    assert {run["device"] for run in report["runs"]} == {"no GPU"}
    assert report["environment"]["versions"]["torch"] == torch.__version__


def test_the_proof_without_torch_holds_and_can_fail() -> None:
    with pytest.raises(SystemExit, match="was imported before the check began"):
        without_torch.main()
    with pytest.raises(ImportError, match=r"torch\.nn must not be imported here"):
        without_torch.Forbidden().find_spec("torch.nn")
    task = next(task for task in suites.reference(suites.Choice()) if task.name == "without torch")
    outcome = run(task)
    assert outcome.status == PASSED, outcome.log
    assert outcome.log.endswith("not imported: torch, triton, cuda\n")


def test_torch_itself_still_computes_the_fixtures() -> None:
    task = next(task for task in suites.oracle(suites.Choice()) if "oracle.py" in " ".join(task.command))
    release = json.loads((ROOT / "tools/fused_adamw/pytorch_fixtures.json").read_text())["torch"]
    if torch.__version__.partition("+")[0] != release:
        pytest.skip(f"the fixtures were made with torch {release}")
    outcome = run(task)
    assert outcome.status == PASSED, outcome.log
    assert "12 cases agree with the FP64 reference" in outcome.log


def test_simulations_are_labelled_and_no_benchmark_takes_one(monkeypatch) -> None:
    for task in suites.simulate(suites.Choice()):
        assert task.simulation
        assert "simulation" in task.name
        assert "simulation" in task.device
    bench = pytest.importorskip("fused_adamw.bench", reason="the benchmark needs matplotlib", exc_type=ImportError)
    device = torch.device("cpu")
    assert bench.backend_of(device, None) == "cpu"
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RuntimeError, match="an interpreter's times are no benchmark"):
            bench.backend_of(device, None)
    with monkeypatch.context() as patch:
        from ruda_optim.fused_adamw import kernels

        simulated = type("Simulated", (), {"name": "nvrtc (host simulation)"})
        patch.setitem(kernels._loaded, "cpu", simulated)
        with pytest.raises(RuntimeError, match=r"the backend is 'nvrtc \(host simulation\)'"):
            bench.backend_of(device, None)


@pytest.mark.parametrize("words", [[], ["python3"], ["no-such-python", "build/gpu"]])
def test_the_gpu_script_says_what_it_needs(words) -> None:
    done = subprocess.run(["tools/gpu.sh", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tools/gpu.sh" in done.stderr


def test_the_matrix_says_what_it_could_not_run() -> None:
    command = ["tools/matrix.sh", "no-such-python:2.13.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "nothing ran"
    head, row = done.stdout.splitlines()
    assert head.split() == ["python", "torch", "status", "tests"]
    assert re.fullmatch(r"no-such-python 2\.13\.0 +not run +no no-such-python here", row)
