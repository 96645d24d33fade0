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
<testcase classname="tests.clients.test_programs" name="test_codex_a_turn" />
<testcase classname="tests.clients.test_programs" name="test_open_webui[ollama]" />
<testcase classname="tests.clients.test_programs" name="test_aider"><skipped /></testcase>
</testsuite></testsuites>"""


def test_the_page_lists_every_client_as_passed() -> None:
    assert compatibility.form_of(compatibility.PAGE.read_text(encoding="utf-8")) == []


def test_every_module_of_clients_is_known() -> None:
    modules = {path.stem for path in (ROOT / "tests" / "clients").glob("test_*.py")}
    assert modules == {*compatibility.CLIENTS, *compatibility.OWN, "test_programs"}


def test_outcomes_of_a_report() -> None:
    found, date = compatibility.read(REPORT)
    assert date == "2026-11-23"
    assert set(found) == {"test_openai", "test_ollama", "aider", "codex", "open webui"}
    assert found["test_openai"].outcomes == {"chat": "fail", "a stream": "skipped"}
    versions = dict.fromkeys((name for names in compatibility.CLIENTS.values() for name in names), "1.2")
    before = "| aider | 0.8 | 2026-11-01 | an edit | pass |\n| Codex CLI | 0.1 | 2026-11-01 | a turn | pass |\n"
    page = compatibility.page(found, date, versions | {"Codex CLI": "0.2"}, "a machine", before)
    assert "| `openai` | 1.2 | 2026-11-23 | chat; a stream | **fail**: chat |" in page
    assert "| `ollama` | 1.2 | 2026-11-23 | chat | pass |" in page
    assert "openai: **fail**: chat" in compatibility.form_of(page)
    assert "anthropic is missing" in compatibility.form_of(page)
    assert "| aider | 0.8 | 2026-11-01 | an edit | pass |" in page
    assert "| Codex CLI | 0.2 | 2026-11-23 | a turn | pass |" in page
    assert "| Open WebUI |  | 2026-11-23 | ollama | pass |" in page
    assert "| Cline CLI |  | 2026-11-23 |  | not run |" in page
