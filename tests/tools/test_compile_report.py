"""Instructions counted in machine code, and the file that keeps what compilers made of every device kernel."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pytest

from fused_adamw import compile_report, machine_code

ROOT = pathlib.Path(__file__).resolve().parents[2]


def listing(*lines: str) -> str:
    """As nvdisasm prints a kernel: labels begin a line, instructions follow their offset."""
    text = [".text.kernel:"]
    for offset, line in enumerate(lines):
        text.append(line if line.startswith(".L") else f"        /*{16 * offset:04x}*/                   {line} ;")
    return "\n".join([*text, ".text.other:", ".L_x_1:", "        /*0000*/                   STG.E.128 [R2], R4 ;"])


WIDE = "STG.E.128 desc[UR4][R2.64], R4"
BACK = "@P0 BRA `(.L_x_1)"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (("MOV R1, c[0x0][0x28]", ".L_x_1:", "LDG.E.128 R4, [R2.64]", WIDE, BACK, "EXIT"), (3, 0)),
        # What is called for unusual numbers is jumped over.
        ((".L_x_1:", "@!P1 BRA `(.L_x_2)", "MOV R7, R8", "CALL.REL.NOINC `($slow)", ".L_x_2:", WIDE, BACK), (3, 0)),
        # The shorter of two branches; an unconditional one has no other way.
        ((".L_x_1:", "@P1 BRA `(.L_x_2)", "FADD R1, R1, R1", "FADD R1, R1, R1", "BRA `(.L_x_3)", ".L_x_2:",
          "FADD R1, R1, R1", ".L_x_3:", WIDE, BACK), (4, 0)),
        ((".L_x_1:", "BRA.U !UP0, `(.L_x_2)", "FADD R1, R1, R1", ".L_x_2:", WIDE, BACK), (3, 0)),
        # The loop that takes elements one by one does not count, wherever it stands.
        ((".L_x_2:", "STG.E desc[UR4][R2.64], R4", "@P0 BRA `(.L_x_2)", ".L_x_1:", "FADD R1, R1, R1", WIDE, BACK),
         (3, 0)),
        ((".L_x_1:", "LDL R4, [R1]", "STG.E.64 [R2.64], R4", "STL [R1+0x4], R4", BACK), (4, 2)),
        (("STL [R1], R4", ".L_x_1:", WIDE, BACK), (2, 0)),
        ((WIDE, "EXIT"), None),
        (("STG.E [R2], R4", ".L_x_1:", "STG.E [R2], R4", BACK), None),
    ],
    ids=["straight", "slow path", "two ways", "uniform branch", "two loops", "spilled", "spilled before", "no loop",
         "one by one"],
)  # fmt: skip
def test_instructions_once_around_the_loop_over_vectors(lines, wanted) -> None:
    assert machine_code.wide_loop(listing(*lines)) == wanted


NVRTC = {"arch": "sm_90", "registers": 60, "stack_bytes": 0, "spill_bytes": 0, "problems": [],
         "toolchain": "NVRTC 13.5 (nvidia-cuda-nvrtc 13.5.37)"}  # fmt: skip
TRITON = {"kernel": "update", "triton": "3.9.0", "registers": 50, "stack_bytes": 8, "spills": 0, "problems": []}


def made_facts() -> list[dict[str, object]]:
    triton = [(0, "sm_90", 50.0), (8 | 64 | 2 | 1024, "sm_90", 99.0), (128, "sm_90", 10.0), (0, "gfx942", None)]
    return [
        NVRTC | {"instance": "ruda::update<0, 0, 0, 0>", "instructions_per_element": 51.5},
        NVRTC | {"instance": "ruda::update<0, 0, 0, 2>", "instructions_per_element": 95.25, "problems": ["too many"]},
        NVRTC | {"instance": "ruda::update<-1, -1, -1, 2>", "instructions_per_element": 120.0, "registers": 99},
        NVRTC | {"instance": "ruda::analyze<1>", "instructions_per_element": None},
        *(TRITON | {"target": target, "constants": {"KIND": kind}, "instructions_per_element": count}
          for kind, target, count in triton),
    ]  # fmt: skip


def test_both_compilers_kernels_are_told_in_the_same_words() -> None:
    report = compile_report.summary(made_facts())
    nvrtc, sm_90, gfx942 = report["compiled"]
    assert (nvrtc["compiler"], nvrtc["version"], nvrtc["target"], nvrtc["kernels"]) == ("NVRTC", "13.5", "sm_90", 4)
    assert nvrtc["registers"] == {"update": 60, "general update": 99, "analyze": 60}
    assert nvrtc["problems"] == {"ruda::update<0, 0, 0, 2>": ["too many"]}
    assert (sm_90["compiler"], sm_90["kernels"], sm_90["stack_bytes"], gfx942["target"]) == ("Triton", 3, 8, "gfx942")
    counts = [tuple(count.values()) for count in report["instructions per element"]]
    assert counts == [
        ("NVRTC", "13.5", "float32", "float32", False, "float32", 51.5),
        ("NVRTC", "13.5", "float32", "float32", False, "packed16", 95.25),
        ("Triton", "3.9.0", "float32", "float32", False, "float32", 50.0),
        ("Triton", "3.9.0", "bfloat16", "split", False, "packed16", 99.0),
    ]


def test_the_report_is_made_of_a_folder(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "nvrtc-13.5-sm_90.json").write_text(json.dumps(made_facts()[:4]))
    output = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["compile_report.py", str(tmp_path), "--output", str(output)])
    assert compile_report.main() == 0
    assert "4 kernels in 1 files, 1 with problems" in capsys.readouterr().out
    assert json.loads(output.read_text())["what"].endswith("compiled, not run.")
    monkeypatch.setattr(sys, "argv", ["compile_report.py", str(tmp_path / "nowhere")])
    assert compile_report.main() == 2


def test_the_page_says_compiled_and_not_run() -> None:
    specification = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert specification is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    facts = made_facts()
    facts.insert(1, NVRTC | {"instance": "ruda::update<0, 0, 0, 1>", "instructions_per_element": 76.25})
    text = generate.compiled(compile_report.summary(facts))
    assert "| Compiler | Compiled for, not run |" in text
    assert "| NVRTC 13.5 | sm_90 | 5 | 60 / 99 / 60 | 0 / 0 | 1 on sm_90 |" in text
    assert "| NVRTC 13.5 | FP32 | 51.5 | 76.25 | 95.25 | +43.8 |" in text


def test_the_numbers_of_the_kinds_are_those_of_the_launch_table() -> None:
    from ruda_optim.fused_adamw.kernels.block_map import UPDATE_KIND
    from ruda_optim.fused_adamw.kernels.tables import MOMENTS_KIND, Flag
    from ruda_optim.fused_adamw.kernels.triton.memory import GENERAL_KIND

    assert set(compile_report._FORM) == {0, *map(int, (Flag.MOMENTS_BF16, Flag.MOMENTS_PACKED))}
    assert sum(compile_report._FORM) == MOMENTS_KIND
    assert set(compile_report._GRAD) == {0, int(Flag.GRAD_FP16), int(Flag.GRAD_BF16)}
    assert set(compile_report._COPY) == {0, int(Flag.COPY_FP16), int(Flag.COPY_BF16), int(Flag.COPY_BF16 | Flag.SPLIT)}
    assert (compile_report._AMSGRAD, compile_report._STRIDED) == (Flag.AMSGRAD, Flag.STRIDED)
    assert compile_report._GENERAL == GENERAL_KIND
    known = 3 | 76 | compile_report._AMSGRAD | compile_report._STRIDED | MOMENTS_KIND
    assert known == UPDATE_KIND
