"""docs/compatibility.md has the form that `make clients` writes, with every client of tests/clients."""

from __future__ import annotations

from pathlib import Path

from scripts import compatibility

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite timestamp="2026-11-23T13:00:00.1+00:00">
<testcase classname="tests.clients.test_openai" name="test_chat[a-b]" />
<testcase classname="tests.clients.test_openai" name="test_chat[c]"><failure message="x" /></testcase>
<testcase classname="tests.clients.test_openai" name="test_a_stream"><skipped /></testcase>
<testcase classname="tests.clients.test_ollama" name="test_chat" />
<testcase classname="tests.clients.test_loopback" name="test_own" />
</testsuite></testsuites>"""


def test_the_page_lists_every_client_as_passed() -> None:
    assert compatibility.form_of(compatibility.PAGE.read_text(encoding="utf-8")) == []


def test_every_module_of_clients_is_known() -> None:
    modules = {path.stem for path in (ROOT / "tests" / "clients").glob("test_*.py")}
    assert modules == {*compatibility.CLIENTS, *compatibility.OWN, "test_programs"}


def test_outcomes_of_a_report() -> None:
    found, date = compatibility.read(REPORT)
    assert date == "2026-11-23"
    assert set(found) == {"test_openai", "test_ollama"}
    assert found["test_openai"].outcomes == {"chat": "fail", "a stream": "skipped"}
    versions = dict.fromkeys((name for names in compatibility.CLIENTS.values() for name in names), "1.2")
    page = compatibility.page(found, date, versions, "a machine")
    assert "| `openai` | 1.2 | 2026-11-23 | chat; a stream | **fail**: chat |" in page
    assert "| `ollama` | 1.2 | 2026-11-23 | chat | pass |" in page
    assert "openai: **fail**: chat" in compatibility.form_of(page)
    assert "anthropic is missing" in compatibility.form_of(page)
