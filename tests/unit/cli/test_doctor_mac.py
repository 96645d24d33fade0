"""`tandem doctor --mac`: that it runs here, that no stage can spoil the block, and that each sees what it is for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.cli.doctor.checks import chosen
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.host import wheel_tag
from mlx_tandem.cli.doctor.mac import command, decode, engine, idle, machine, stages
from mlx_tandem.cli.doctor.mac.stages import ALL, STAGES
from mlx_tandem.cli.doctor.result import Check, Failed, Outcome
from mlx_tandem.cli.doctor.sizes import Sizes
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.prefill import Prefill
from mlx_tandem.model import kernel_checks
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.dialect import Kernel, Source
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import MemoryBudget
from tests.kernels import gpu as fake
from tests.kernels import shim
from tests.kernels.gpu import Gpu
from tests.terminal import Terminal
from tests.unit.cli.test_doctor import check
from tests.unit.cli_tools import on_a_thread, tandem

ROOT = Path(__file__).resolve().parents[3]

LEAST = Sizes.least("")

OF_MACS = {"accelerators", "kernels", "overlap-1", "overlap-1,000"}
"""Stages that a machine without an Apple GPU or any GPU skips."""


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(LEAST)
    with made.cleanup:
        yield made


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_here_with_little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is of macOS or a GPU is skipped by name. Of the ordinary checks, which test_doctor.py has, one runs."""
    monkeypatch.setattr(stages, "ALL", (*chosen("packages"), *STAGES))
    done = tandem("doctor", "--mac", "--quick")
    assert done.returncode == 0, done.stdout
    title, *lines = done.stdout.splitlines()
    assert title.startswith("<details><summary>tandem doctor --mac --quick on Linux, which is not a Mac: ")
    assert done.stderr.startswith("tandem: this is not a Mac but Linux: ")
    rows = dict(re.findall(r"^\| ([\w,-]+) \| (\w+) \| \S", done.stdout, re.MULTILINE))
    assert list(rows) == ["packages", *(stage.name for stage in STAGES)]
    assert {name for name, status in rows.items() if status == "skipped"} == OF_MACS
    assert lines[-1].startswith(f"**tandem doctor --mac --quick on Linux, which is not a Mac: {len(rows) - 4} of ")
    assert re.search(
        r"^- decode-long: 1x96_tokens_s [\d.]+ and [\d.]+, .*2x96_mlx_lm_tokens_s", done.stdout, re.MULTILINE
    )
    assert re.search(r"^- memory-after: limit_gb .*MemAvailable \d+ kB", done.stdout, re.MULTILINE)
    assert re.search(r"^\| idle \| ok \| \d+ s without a request, awake: the engine lives", done.stdout, re.MULTILINE)
    assert len(done.stdout) < 8000, "an issue's reader would rather not"
    for hidden in (str(Path.home()) + "/", str(ROOT), "/tmp/"):
        assert hidden not in done.stdout, hidden


def test_a_stage_that_dies_or_hangs_costs_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DETAIL", 2)
    checks = [check("dies"), check("hangs", 3), check("raises"), check("well")]
    assert command.examine(checks, None, quick=True) == 1
    said = capsys.readouterr()
    assert re.search(r"^\| dies \| \*\*FAILED\*\* \| the process of this check died of SIGABRT", said.out, re.MULTILINE)
    assert re.search(r"^\| hangs \| \*\*FAILED\*\* \| did not end within 3 s", said.out, re.MULTILINE)
    assert "| well | ok | all is well |" in said.out
    assert said.out.splitlines()[-1].endswith("Failed: dies, hangs, raises.")
    assert "Traceback" not in said.out and "a word before it" in said.out, "the last lines only"
    assert "tandem: 2 of 4, hangs: 0 s, about " in said.err and "tandem: hangs has failed" in said.err


def test_ctrl_c_prints_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, whose line with the progress is gone by then."""
    monkeypatch.setenv("DOCTOR_OTHER", str(tmp_path / "pid"))
    program = (
        "from mlx_tandem.cli.doctor.mac import command; from tests.unit.cli.test_doctor import check;"
        "checks = [check('well'), check('leaves_another'), check('counts')];"
        "raise SystemExit(command.examine(checks, None, quick=True))"
    )
    terminal = Terminal([sys.executable, "-c", program], 80, 50)
    try:
        terminal.read_until(
            lambda lines: (
                any(line.startswith("tandem: 2 of 3, leaves_another: ") for line in lines)
                and (tmp_path / "pid").exists()
                and bool((tmp_path / "pid").read_text())
            )
        )
        terminal.process.send_signal(signal.SIGINT)
        screen = terminal.read_to_end()
        assert terminal.process.wait() == command.INTERRUPTED
    finally:
        terminal.close()
    text = " ".join(screen)
    assert "| well | ok | all is well |" in text
    for name in ("leaves_another", "counts"):
        assert f"| {name} | skipped | not run: interrupted |" in text
    assert "1 of 3 checks pass, 2 could not be run.**" in text and "2 of 3, leaves" not in text
    assert "Traceback" not in text
    other = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    assert not other.exists() or not other.read_bytes()


def test_time_left_goes_down_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    first, second = Check("a", "", "", 500, usual=200), Check("b", "", "", 100, usual=50, hint="do this")
    progress = command.Progress([first, second], float("inf"))
    progress.show(first, 0.0)
    progress.show(first, 120.0)
    progress.show(first, 300.0)  # it takes longer than usual: the rest stays
    assert re.findall(r"(\d+) s, about (\d+ \w+) left", capsys.readouterr().err) == [
        ("0", "4 min"), ("120", "2 min"), ("300", "50 s"),
    ]  # fmt: skip
    assert max(len(f"tandem: 28 of 28, {stage.name}: 1000 s, about 10 min left") for stage in ALL) < 80


def test_options_that_do_not_go_together() -> None:
    for words, told in ((["--mac", "--json"], "--mac"), (["--quick"], "--quick"), (["--model", "."], "--model")):
        done = tandem("doctor", *words)
        assert done.returncode == 2 and f"Invalid value for {told}" in done.stderr


# --- what is said of it ------------------------------------------------------------------------------------------


def test_the_page_has_every_stage() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.partition("## On a Mac")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w,-]+)`", table, re.MULTILINE) == [stage.name for stage in STAGES[:-1]]


TIMES = re.compile(r"(?:under|within|about|in|takes) (?:a|half a|one|ten|twenty|\d+) (?:second|minute)s?\b")


def test_all_pages_say_the_same_times() -> None:
    """The ordinary command ends within a minute; with --mac it takes about ten."""
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            for sentence in re.split(r"(?<=[.:])\s", " ".join(paragraph.split())):
                if "tandem doctor" in sentence or page.name == "doctor.md":
                    found["--mac" in sentence].update(TIMES.findall(sentence))
    assert found == {False: {"within a minute"}, True: {"about ten minutes"}}


# --- the machine -------------------------------------------------------------------------------------------------

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5000.
Pages wired down:                        100000.
"Translation faults":                 123456789.
File-backed pages:                       300000.
Pages stored in compressor:                   0.
"""


def test_what_vm_stat_says_is_kept() -> None:
    assert machine.parse_vm_stat(VM_STAT) == {
        "page size": 16384, "free": 5000, "wired down": 100_000, "Translation faults": 123_456_789,
        "File-backed pages": 300_000, "stored in compressor": 0,
    }  # fmt: skip
    assert machine.parse_vm_stat("sh: vm_stat: not found") == {}


def test_the_tag_of_a_wheel() -> None:
    assert re.fullmatch(r"cp\d+-cp\d+-\w+", wheel_tag("mlx")), "MLX is installed from a wheel here"
    assert wheel_tag("no-such-package") == ""
    assert f"mlx: {wheel_tag('mlx')}" in machine.wheel(Bench()).says


@pytest.mark.parametrize(
    ("architecture", "release", "in_wheel", "says", "advises"),
    [
        ("applegpu_g17s", "26.2", True, "used", False),
        ("applegpu_g17g", "26.1", True, "not used: macOS is 26.1", True),
        ("applegpu_g17g", "15.6", False, "not used: macOS is 15.6", True),
        ("applegpu_g18g", "27.0", False, "not used: this MLX was built without", True),
        ("applegpu_g16s", "26.3", True, "has none", False),
        ("applegpu_g17p", "26.3", True, "has none", False),
        ("applegpu_g18p", "26.3", True, "used", False),
        ("", "26.3", True, "unknown", False),
    ],
)
def test_the_accelerators_are_used_or_not(
    architecture: str, release: str, in_wheel: bool, says: str, advises: bool
) -> None:
    found = machine.judged(architecture, release, in_wheel)
    assert says in found.says and found.says.startswith("not") == says.startswith("not")
    assert ("SYSTEM_VERSION_COMPAT=0" in found.advice) == advises


def test_functions_for_the_accelerators_are_found_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mlx.metallib"
    for content, found in ((b"", False), (b"MTLB" + b"x" * 99 + b"affine_qmm_n", False), (b"\0qmm_n_nax_float", True)):
        file.write_bytes(content)
        assert machine.holds_accelerated(file) == found
    assert not machine.holds_accelerated(None)


# --- stages on the device ----------------------------------------------------------------------------------------


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A Metal device that is not there; its kernels are compiled for the CPU, where they are slow."""
    monkeypatch.setattr(inplace, "MOST", float("inf"))
    monkeypatch.setattr(kernel_checks, "HALVES", (mx.bfloat16,))
    yield fake.install("metal", shim.maker(), monkeypatch)
    inplace.writing.cache_clear()


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
def test_each_kernel_is_compiled_and_judged_by_itself(metal: Gpu, bench: Bench) -> None:
    right = engine.kernels(bench)
    assert right.says.endswith("s: all are right") and not right.advice
    made = {name for name, _ in metal.sources}
    assert made >= {"store", "swiglu", "add_norm", "gated_delta", "argmax", "gumbel_max", "truncated_draw"}
    assert made >= {"paged_attention", "lora_shrink_3"}
    metal.faults = {
        "swiglu": fake.instead("swiglu(gate.y, up.y, T())", "swiglu(gate.x, up.x, T())"),
        "lora": fake.uncompilable,
        "paged_attention": fake.uncompilable,
    }
    with pytest.raises(Failed, match="4 cannot be used: attention bfloat16") as failed:
        engine.kernels(bench)
    for told in ("swiglu: the kernel is wrong by", "adapters: RuntimeError: [metal::Device] Unable to build"):
        assert told in failed.value.says
    assert failed.value.figures.keys() == right.figures.keys(), "every kernel has its seconds"


def test_first_calls_of_each_form_are_timed() -> None:
    def make(source: Source) -> Kernel:
        return lambda inputs, template, groups, threads, outputs: [mx.zeros(*shaped) for shaped in outputs]

    calls = kernel_checks.FirstCalls(make)
    kernel = calls(Source("any", ["x"], ["y"], ""))
    for dtype, width in ((mx.float32, 1), (mx.float32, 1), (mx.float16, 1), (mx.float32, 2), (mx.float16, 1)):
        kernel([mx.ones(3, dtype)], {"WIDTH": width}, (1, 1, 1), 32, [((3,), mx.float32)])
    assert calls.forms == 3 and calls.seconds > 0


def test_steps_that_disturb_each_other_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other run of steps in flight together, a byte of what is read back is another."""
    assert engine.overlap(bench).figures == {"runs": 2, "other_contents": 0}
    wait, reads = MLXRunner.wait, iter(range(100))

    def other(self: MLXRunner, flight: Any) -> Any:
        result = wait(self, flight)
        if result.saves and next(reads) == 2:
            result.saves[0] = b"x" + result.saves[0][1:]
        return result

    monkeypatch.setattr(MLXRunner, "wait", other)
    with pytest.raises(Failed, match=r"^1 of 2 runs left other keys"):
        engine.overlap(bench)


def test_a_long_prompt_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is left out for lack of time, and memory that was not planned."""
    found = engine.prompt(bench)
    assert found.figures["tokens"] == LEAST.prompt and not found.advice
    started = engine._started(bench)
    memory = structs.replace(started.built.info.memory, activations=1 << 20)
    little = replace(started.built, info=structs.replace(started.built.info, memory=memory))
    prefill = Prefill(SchedulerConfig(), StepLimits(tokens=32), little.info.vocab_size)
    monkeypatch.setattr(engine, "_started", lambda bench: engine.Started(little, started.choices, prefill))
    held: list[mx.array] = []
    launch = MLXRunner.launch

    def holds(self: MLXRunner, plan: Any) -> Any:
        held.append(mx.zeros((8 << 20,), mx.uint8) + 1)
        mx.eval(held)
        return launch(self, plan)

    monkeypatch.setattr(MLXRunner, "launch", holds)
    more = engine.prompt(bench)
    assert more.figures["chunks"] == "32 to 32" and float(more.figures["beside_mb"]) > 6 * 8
    assert "more memory than was set aside" in more.advice
    bench.sizes = structs.replace(bench.sizes, prompt_seconds=0.0)
    cut = engine.prompt(bench)
    assert cut.figures["tokens"] == 64 and "of 192, for which there was time" in cut.says


def test_what_does_not_fit_is_left_out_with_its_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.sizes = structs.replace(LEAST, contexts=(16, 48, 60_000))
    with pytest.raises(Failed, match="sequences have 40,960 tokens at most"):
        decode.long(bench)
    bench.sizes = structs.replace(LEAST, decode_seconds=0.0)
    found = on_a_thread(lambda: decode.short(bench))
    assert isinstance(found, Outcome)
    assert re.fullmatch(
        r"left out: 1 x 16: reading the prompts would take 0 s a time; left out: 2 x 16: .*", found.says
    )


def test_the_users_own_model_is_measured_beside_mlx_lm_if_both_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(structs.replace(LEAST, model=str(demo.MODEL_PATH), rows=(1,)))
    with bench.cleanup:
        found = on_a_thread(lambda: decode.short(bench))
        assert isinstance(found, Outcome)
        assert re.fullmatch(r"1 x 16: [\d,.]+ tokens/s, mlx-lm [\d,.]+ \([\d.]+\)", found.says)
        monkeypatch.setattr(MemoryBudget, "unassigned", 0)
        found = on_a_thread(lambda: decode.short(bench))
        assert isinstance(found, Outcome)
        assert re.fullmatch(
            r"1 x 16: [\d,.]+ tokens/s; without mlx-lm: its 0.0 GB do not fit beside the engine's", found.says
        )


def engines() -> set[int]:
    """The engines of this process's servers."""
    found = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()[1:]]
    servers = [pid for pid, parent, _ in lines if parent == str(os.getpid())]
    return {int(pid) for pid, parent, args in lines if parent in servers and "engine_main" in args}


def test_an_engine_that_dies_while_nothing_is_asked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep
    others = engines()  # fixtures of other tests may have servers in this process, too
    killed: list[int] = []

    def kills(seconds: float) -> None:
        if not killed:
            killed.extend(engines() - others)
            os.kill(killed[0], signal.SIGKILL)
        sleep(seconds)

    monkeypatch.setattr(idle, "time", SimpleNamespace(sleep=kills, time=time.time, monotonic=time.monotonic,
                                                      perf_counter=time.perf_counter))  # fmt: skip
    with pytest.raises(Failed, match=r"started again|answers with 503"):
        idle.waits(Bench(structs.replace(LEAST, idle=3.0)))
    assert len(killed) == 1
