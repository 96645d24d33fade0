"""`tandem doctor`: that it passes here, that what is broken makes it fail, and that its report gives nothing away."""

from __future__ import annotations

import json
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.doctor import device, host, isolate, served
from mlx_tandem.cli.doctor.checks import CHECKS, chosen
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.command import examine
from mlx_tandem.cli.doctor.known import explain
from mlx_tandem.cli.doctor.redact import Redactor
from mlx_tandem.cli.doctor.report import data, folded, markdown
from mlx_tandem.cli.doctor.result import Check, Failed
from mlx_tandem.cli.doctor.sizes import Sizes
from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.engine.client import start_times
from mlx_tandem.engine.client.ending import explain_end
from mlx_tandem.engine.client.start_times import KeptTimes, Stage
from mlx_tandem.model.backend.cpu import Cpu
from mlx_tandem.model.ops.attention import cases, portable
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.parts import Flight
from tests.unit.cli_tools import tandem
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]


def check(function: str, seconds: float = 60, needs: str = "") -> Check:
    return Check(function, f"whether it {function}", f"tests.unit.doctor_checks:{function}", seconds, needs)


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_passes_here_and_names_every_check() -> None:
    command = [sys.executable, "-m", "mlx_tandem", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["well"]
    assert [c["check"] for c in report["checks"]] == [c.name for c in CHECKS]
    assert {c["status"] for c in report["checks"]} <= {"ok", "note"}
    figures = {c["check"]: c["figures"] for c in report["checks"]}
    assert figures["attention"].keys() == {f"{b} {t}" for b in cases.BACKENDS for t in cases.TYPES}
    assert figures["speed"]["tokens_s_at_8"] > 0
    assert figures["learning"]["loss_after"] < figures["learning"]["loss_before"]
    text = markdown(report)
    assert text.startswith(f"### tandem doctor: {len(CHECKS)} of {len(CHECKS)} checks pass")
    for c in CHECKS:
        assert re.search(rf"^\| {c.name} \| (ok|note) \|", text, re.MULTILINE)
    assert f"mlx-lm {report['versions']['mlx-lm']}" in text
    block = folded(text)
    assert block.startswith(f"<details><summary>tandem doctor: {len(CHECKS)} of {len(CHECKS)} checks pass</summary>")
    assert block.endswith(f"</details>\n\n**tandem doctor: {len(CHECKS)} of {len(CHECKS)} checks pass.**")
    assert "###" not in block


def test_it_shows_what_the_last_start_spent_its_time_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = next(c for c in CHECKS if c.name == "starts")
    (finding,) = isolate.run([check])
    assert (finding.status, finding.says, finding.table) == ("ok", "no start of a server is known", {})
    stages = Stage("starting", 0.25), Stage("reading weights", 3.0), Stage("checking attention", 30.125, once=True)
    config = Config(EngineConfig(ModelConfig("/home/somebody/models/mine")))
    KeptTimes(start_times.folder(), config).keep(stages)
    (finding,) = isolate.run([check])
    assert re.fullmatch(
        r"mine was ready after 33\.4 s on [\d-]+ [\d:]+, 30\.1 s of it in the stage “checking attention”", finding.says
    )
    text = markdown(data("tandem doctor", describe(), [finding]))
    assert (
        "| starts | s |\n|---|---:|\n| starting | 0.25 |\n| reading weights | 3 |\n| checking attention | 30.1 |"
        in text
    )
    assert "somebody" not in text


def test_the_page_has_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.partition("## What is checked")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [c.name for c in CHECKS]


def test_some_are_run_with_what_they_need() -> None:
    assert [c.name for c in chosen("equivalence,python")] == ["python", "device", "engine", "equivalence"]
    assert chosen("") == CHECKS
    done = tandem("doctor", "--only", "ears")
    assert done.returncode == 2 and "'ears' is not one of python, system" in " ".join(done.stderr.split())


# --- checks that fail --------------------------------------------------------------------------------------------


def test_a_broken_kernel_fails_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine([check("well"), check("broken_kernel"), check("advises")], as_json=False) == 1
    text = capsys.readouterr().out
    assert "2 of 3 checks pass, 1 failed, 1 with something to do" in text
    assert "'broken' is off by" in text and "'portable' is off by" not in text
    assert "please report it" in text and "| advises | note | slow |" in text and "do this" in text


@pytest.mark.parametrize("as_block", [False, True])
def test_the_verdict_is_the_last_line(as_block: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A long report has moved its beginning out of sight."""
    names = ["well", "fails", "advises", "is_of_macos", "raises"]
    assert examine([check(name) for name in names], as_json=False, as_block=as_block) == 1
    *_, before, last = capsys.readouterr().out.splitlines()
    assert last == (
        "**tandem doctor: 2 of 5 checks pass, 2 failed, 1 could not be run, 1 with something to do.** "
        "Failed: fails, raises. With something to do: advises."
    )
    assert not before


def test_what_does_not_apply_is_skipped() -> None:
    (found,) = isolate.run([check("is_of_macos")])
    assert (found.status, found.says) == ("skipped", "only Macs have this")


def test_a_check_can_have_a_process_and_an_environment_of_its_own() -> None:
    shared = check("tells_its_process")
    alone = [
        structs.replace(shared, name=word, alone=True, environment={"DOCTOR_WORD": word}) for word in ("one", "two")
    ]
    checks = [shared, replace_name(shared, "again"), *alone, replace_name(shared, "last")]
    said = [f.says.split() for f in isolate.each(checks, sizes=Sizes(overlaps=7))]
    assert [word for _, word, _ in said] == ["None", "None", "one", "two", "None"]
    assert [said[0][0] == pid for pid, _, _ in said] == [True, True, False, False, False]
    assert {overlaps for *_, overlaps in said} == {"7"}


def test_when_the_time_is_up_the_rest_is_skipped() -> None:
    found = list(isolate.each([check("hangs"), check("well")], seconds=2))
    assert [f.status for f in found] == ["failed", "skipped"]
    assert found[0].says.startswith("did not end within 2 s") and "the time was up" in found[1].says


def test_what_a_check_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_OTHER", str(tmp_path / "pid"))
    assert [f.status for f in isolate.run([check("leaves_another", 5)])] == ["failed"]
    other = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")  # a zombie's is empty
    until(lambda: not other.exists() or not other.read_bytes())


def test_one_that_dies_or_hangs_is_reported_and_the_others_run() -> None:
    names = ["counts", "dies", "well", "leaves", "raises", "counts"]
    checks = [check(name) for name in names[:-1]] + [check("hangs", 3), check("fails")]
    found = {f.check: f for f in isolate.run(checks)}
    assert {n: f.status for n, f in found.items()} == {
        "counts": "ok", "dies": "failed", "well": "ok", "leaves": "failed", "raises": "failed",
        "hangs": "failed", "fails": "failed",
    }  # fmt: skip
    assert "SIGABRT" in found["dies"].says and "mlx.metallib" in found["dies"].advice
    assert "default metallib" in found["dies"].detail
    assert "status 3" in found["leaves"].says
    assert "a word before it" in found["raises"].detail and "ImportError" in found["raises"].detail
    assert "libmlx" in found["raises"].says and "[cuda12]" in found["raises"].advice
    assert "did not end within 3 s" in found["hangs"].says
    assert not found["well"].detail
    assert found["well"].figures == {"number": 1.5, "infinite": "inf"}


def test_what_needs_a_failed_one_is_skipped() -> None:
    found = isolate.run([check("fails"), check("well", needs="fails"), check("counts", needs="well"), check("raises")])
    assert [f.status for f in found] == ["failed", "skipped", "skipped", "failed"]
    assert "'fails'" in found[1].says


def test_checks_share_what_one_of_them_has_made() -> None:
    twice = [check("counts"), replace_name(check("counts"), "again")]
    assert [f.says for f in isolate.run(twice)] == ["1", "2"]


def replace_name(c: Check, name: str) -> Check:
    return structs.replace(c, name=name)


# --- the report gives nothing away -------------------------------------------------------------------------------


def test_a_report_hides_where_it_was_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLX_SOMETHING", f"{Path.home()}/models/mine")
    monkeypatch.setenv("MY_API_KEY", "sk-very-secret")
    for as_json in (False, True):
        assert examine([check("fails"), check("raises")], as_json) == 1
        text = capsys.readouterr().out
        assert "mend it" in text and "wrong in" in text
        for hidden in (str(Path.home()) + "/", str(ROOT), "/srv", "secret", socket.gethostname()):
            assert hidden not in text, hidden


@given(st.lists(st.sampled_from(["Users", "ann", "x-1", "lib.so", "a.b"]), min_size=2, max_size=6))
def test_of_a_path_only_the_last_part_is_left(parts: list[str]) -> None:
    said = Redactor().text(f"in '/{'/'.join(parts)}' and (/{'/'.join(parts)}):")
    assert said == f"in '…/{parts[-1]}' and (…/{parts[-1]}):"


def test_of_a_folder_that_the_user_names_only_the_last_part_is_left() -> None:
    """Names of volumes have blanks."""
    said = Redactor(["/Volumes/Ann Smith's drive/models/mine"]).text("in /Volumes/Ann Smith's drive/models/mine/x")
    assert said == "in mine/x"


def test_names_and_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "annabel")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setattr(socket, "gethostname", lambda: "annas-mac.local")
    said = Redactor().tree({"a": ["annabel on annas-mac.local, annas-mac", "hf_abcdef"], "n": 3, "b": "https://h.x/y"})
    assert said == {"a": ["… on …, …", "…"], "n": 3, "b": "…"}
    assert Redactor().text("annabelle, 3/4 and MB/s") == "annabelle, 3/4 and MB/s"


# --- known failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Failed to load the default metallib. This library is using language version 4.0", "newer macOS"),
        ("RuntimeError: Failed to load the default metallib. library not found", "mlx-metal"),
        ("dlopen: (mach-o file, but is an incompatible architecture (have 'arm64', need 'x86_64'))", "Rosetta"),
        ("Symbol not found: _cblas_sgemm$NEWLAPACK Referenced from: libmlx.dylib", "older than this MLX"),
        ("libmlx.so: cannot open shared object file: No such file or directory", "extra"),
        ("No module named 'mlx.core'", "extra"),
        ("/lib/libc.so.6: version `GLIBC_2.35' not found", "glibc"),
        ("CUDA driver version is insufficient for CUDA runtime version", "nvidia-smi"),
        ("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "--memory-fraction"),
        ("Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", "--max-chunk-tokens"),
        ("Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)", "AGX_RELAX_CDM_"),
        ("(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)", "starts afresh"),
        ("[Compile::eval_cpu] Failed to compile function X: sh: g++: not found", "g++"),
        ("[metal::load_device] No Metal device found", "virtual machine"),
        ("reason: '*** -[__NSArray0 objectAtIndex:]: index 0 beyond bounds for empty array'", "virtual machine"),
        ("ValueError: something new", ""),
        ("No module named 'mlxtra'", ""),
    ],
)
def test_known_failures_are_explained(message: str, told: str) -> None:
    assert told in explain(message)
    assert bool(explain(message)) == bool(told)


def test_ends_are_explained() -> None:
    assert explain_end(-9)[0] == "died of SIGKILL" and "memory" in explain_end(-9)[1]
    assert explain_end(1) == ("ended with status 1", "")
    assert explain_end(-40)[0] == "died of signal 40"


def on_a_mac(monkeypatch: pytest.MonkeyPatch, machine: str, release: str, translated: str) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), machine))
    monkeypatch.setattr(host, "_sysctl", lambda name: translated)


@pytest.mark.parametrize(
    ("machine", "release", "translated", "run", "told"),
    [
        ("x86_64", "15.1", "1", host.python, "native Python"),
        ("x86_64", "15.1", "0", host.python, "Apple silicon only"),
        ("arm64", "13.6.1", "0", host.system, "update macOS"),
        ("arm64", "14.0", "0", host.system, ""),
        ("arm64", "26.5.1", "0", host.python, ""),
    ],
)
def test_macs_that_mlx_does_not_run_on(
    machine: str, release: str, translated: str, run: Callable[[Bench], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_mac(monkeypatch, machine, release, translated)
    if told:
        with pytest.raises(Failed) as failed:
            run(Bench())
        assert told in failed.value.advice
    else:
        assert not run(Bench()).advice


def test_versions_that_do_not_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = {"mlx-tandem": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-metal": "0.32.4"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(host, "_version", lambda name: releases.get(name, ""))
    monkeypatch.setattr(host, "_sysctl", lambda name: "Apple M4")
    assert "mlx-metal 0.32.4" in host.packages(Bench()).says
    for change, told in (({"mlx-metal": "0.32.3"}, "but mlx-metal 0.32.3"), ({"mlx-metal": ""}, "is missing"),
                         ({"mlx": "0.31.0"}, ">=0.32.4 is needed"), ({"mlx-lm": "0.33.0"}, "<0.33 is needed"),
                         ({"mlx": ""}, "is not installed")):  # fmt: skip
        monkeypatch.setattr(host, "_version", lambda name, now=releases | change: now.get(name, ""))
        with pytest.raises(Failed, match=re.escape(told)):
            host.packages(Bench())


@pytest.mark.parametrize(
    ("chip", "release", "tag", "told"),
    [
        ("Apple M5 Max", "26.2", "macosx_26_0_arm64", ""),
        ("Apple M5", "26.1", "macosx_26_0_arm64", "update macOS"),
        ("Apple M5", "26.2", "macosx_15_0_arm64", "SYSTEM_VERSION_COMPAT=0"),
        ("Apple M6", "27.0", "macosx_14_0_arm64", "SYSTEM_VERSION_COMPAT=0"),
        ("Apple M4 Pro", "15.5", "macosx_15_0_arm64", ""),
        ("Apple M5", "26.2", "", ""),  # built from source
    ],
)
def test_accelerators_that_mlx_does_without_are_told(
    chip: str, release: str, tag: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlx", "mlx-lm", "mlx-metal"):
        record = tmp_path / f"{name.replace('-', '_')}-0.32.4.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n", encoding="utf-8")
        if tag:
            (record / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    said = {"machdep.cpu.brand_string": chip, "kern.osproductversion": release}
    monkeypatch.setattr(host, "_sysctl", lambda name: said[name])
    advice = host.packages(Bench()).advice
    assert told in advice
    assert bool(advice) == bool(told)


def test_no_compiler_and_a_slow_blas_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_tandem.model import backend
    from mlx_tandem.model import device as machine
    from mlx_tandem.model.backend.cpu import CPU

    monkeypatch.setattr(backend, "current", lambda: CPU)
    monkeypatch.setattr(machine, "OPENBLAS", None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "libopenblas0" in device.opens(Bench()).advice
    assert "g++" in device.compiles(Bench()).advice


# --- what the device checks can see ------------------------------------------------------------------------------

BROKEN: dict[str, Callable[[cases.Case], cases.Case]] = {
    "a window is ignored": lambda c: replace(c, window=None),
    "a window is one too wide": lambda c: replace(c, window=c.window and c.window + 1),
    "sinks are ignored": lambda c: replace(c, sinks=None),
    "the last token is not seen": lambda c: replace(c, keys=c.keys * 1.0, values=mx.roll(c.values, 1, axis=2)),
    "heads are grouped wrongly": lambda c: replace(c, keys=c.keys[:, ::-1]),
    "a row reads another's keys": lambda c: replace(c, keys=mx.roll(c.keys, 1, axis=0)),
    "a block is shared": lambda c: replace(c, tables=c.tables * 0 + c.tables[:1]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_attention_is_seen(what: str) -> None:
    right = cases.BACKENDS[portable.NAME]
    found = cases.worst(lambda case: right(BROKEN[what](case)), device.CASES)
    assert any(worst.error > 5 * worst.allowed for worst in found.values()), what


def test_a_copied_pool_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, wait = MLXRunner.launch, MLXRunner.wait
    held: list[mx.array] = []

    def launch_holding(self: MLXRunner, plan: Any) -> Flight:
        held[:] = [a.reshape(-1) for arrays in self._pool.layers for a in arrays]
        mx.eval(held)  # second references to all data: no write of this step can be in place
        return launch(self, plan)

    def wait_releasing(self: MLXRunner, flight: Flight) -> Any:
        result = wait(self, flight)
        held.clear()
        return result

    monkeypatch.setattr(device, "POOL_BLOCKS", 400)
    assert "in place" in device.pool(Bench()).says
    monkeypatch.setattr(MLXRunner, "launch", launch_holding)
    monkeypatch.setattr(MLXRunner, "wait", wait_releasing)
    with pytest.raises(Failed, match="it is copied"):
        device.pool(Bench())


def test_wrong_answers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are attended to a little wrongly, as by a kernel that loses a part of them."""
    right = Cpu.attend

    def wrong(self: Cpu, queries: mx.array, *rest: Any) -> mx.array:
        return right(self, queries, *rest) * (1.05 if rest[0].shape[2] > 64 else 1.0)

    monkeypatch.setattr(Cpu, "attend", wrong)
    bench = Bench()
    with bench.cleanup, pytest.raises(Failed, match=r"^chunked \(base\): "):
        served.equal(bench)


def test_adapters_that_are_not_installed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraState, "install", lambda *given: False)
    bench = Bench()
    with bench.cleanup:
        with pytest.raises(Failed, match="not those of the adapter"):
            served.swaps(bench)
        with pytest.raises(Failed, match="what is served and what is trained differ"):
            served.learns(bench)
