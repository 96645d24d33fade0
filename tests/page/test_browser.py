"""The page in a headless browser, on real servers: what people see, click and type."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Cancel, Output, Submit
from mlx_tandem.model.vision import library
from mlx_tandem.types import Delta
from tests import scripted_model
from tests.api.learns import trajectories
from tests.api.scripted import scripted_server
from tests.commands import curl
from tests.images import picture
from tests.page.browser import AXE
from tests.page.conftest import Opened
from tests.serving import RunningServer, serving
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

QUESTION = "What is 17 + 25?"
BASE = "tandem-demo"
"""The base's name on the server of the tests."""
VIEWS = ("#overview", "#playground", "#adapters", "#learning", "docs")
NARROW = {"viewport": {"width": 400, "height": 800}}
DARK = {"color_scheme": "dark"}
KEY = "the-right-key"


def ask(page: Page, *models: str, question: str = QUESTION) -> None:
    """Ask these models in the playground and wait for all answers."""
    page.locator("#models input").first.wait_for()
    for box in page.locator("#models input").all():
        box.set_checked(box.get_attribute("value") in models)
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".answer .judge:visible").nth(len(models) - 1).wait_for()
    assert page.locator(".answer").count() == len(models)


def answer(page: Page, model: str) -> Any:
    return page.locator(".answer", has=page.locator("h3", has_text=model))


def opinions(server: RunningServer) -> list[dict[str, Any]]:
    return list(server.client.get("/v1/feedback").json()["data"])


def answered(server: RunningServer, model: str) -> str:
    reply = server.chat(QUESTION, model=model, temperature=0).json()
    return str(reply["choices"][0]["message"]["content"])


def test_the_overview_follows_the_server(opened: Opened, learner: RunningServer) -> None:
    page = opened.go()
    assert page.title() == "Overview · mlx-tandem"
    page.locator("#load-more", has_text="answered").wait_for()
    before = int(page.locator("#load-more").inner_text().split()[0])
    learner.chat(QUESTION, stream=True)
    until(lambda: int(page.locator("#load-more").inner_text().split()[0]) > before)
    until(lambda: page.locator("#first").inner_text() != "–")
    assert page.locator("#rate-plot canvas").count() == 1
    assert "blas" in page.locator("#about").inner_text().lower()
    load = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"the page has loaded after {load:.0f} ms")


def test_a_hidden_page_asks_nothing(opened: Opened) -> None:
    opened.page.clock.install()
    page = opened.go()

    def looks() -> int:
        page.evaluate("0")  # what the browser has told meanwhile is taken in by each call
        return sum(url.endswith("/v1/overview") for url in opened.asked)

    page.clock.run_for(1100)
    until(lambda: looks() >= 2)
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    before = looks()
    page.clock.run_for(10_000)
    assert looks() <= before + 1, "one may have been under way"
    page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
    until(lambda: looks() > before + 1)


def test_two_adapters_answer_side_by_side(opened: Opened) -> None:
    page = opened.go("#playground")
    ask(page, "shout", "json")
    assert answer(page, "shout").locator(".text").inner_text() == "17 + 25 = 42!"
    assert answer(page, "json").locator(".text").inner_text() == '{"answer": 42}'
    first, second = (answer(page, name).bounding_box() for name in ("shout", "json"))
    assert first["y"] == second["y"] and first["x"] != second["x"]


def test_answers_stream_beside_each_other_and_are_stopped(chromium: Browser) -> None:
    with scripted_server(served_model_names=("left", "right")) as (client, peer, _):
        profile = chromium.new_context()
        page = profile.new_page()
        page.goto(f"{str(client.base_url).rstrip('/')}/#playground")
        page.locator("#models input").nth(1).check()
        page.get_by_text("Options").click()
        page.get_by_label("Most tokens").fill("16")
        page.get_by_role("button", name="Ask", exact=True).click()
        requests = [peer.hear(Submit).request for _ in range(2)]
        for length in (1, 2):  # each gets a token in turn, and shows it while the other one's answer is under way
            for request in requests:
                peer.say(Output([Delta(request.id, 0, (301,), None, None)]))
            shown = [page.locator(".answer.coming .text").nth(i) for i in range(2)]
            until(lambda shown=shown, text="ols" * length: [each.inner_text() for each in shown] == [text] * 2)
        page.get_by_role("button", name="Stop").click()
        assert {peer.hear(Cancel).request for _ in range(2)} == {request.id for request in requests}
        page.locator(".answer .stats", has_text="stopped").nth(1).wait_for()
        assert page.get_by_role("button", name="Stop").is_disabled()
        assert page.get_by_role("button", name="Ask", exact=True).is_enabled()
        profile.close()


def test_opinions_reach_the_server(opened: Opened, learner: RunningServer) -> None:
    page = opened.go("#playground")
    ask(page, BASE, "shout")
    answer(page, "shout").get_by_role("button", name="Good").click()
    answer(page, "shout").get_by_text("It is kept").wait_for()
    assert answer(page, "shout").get_by_role("button", name="Good").get_attribute("aria-pressed") == "true"
    answer(page, BASE).get_by_role("button", name="Bad").click()
    answer(page, BASE).get_by_text("It is kept").wait_for()
    answer(page, BASE).get_by_role("button", name="Correct", exact=True).click()
    field = answer(page, BASE).get_by_label("What it should have said")
    assert field.input_value() == "17 + 25 = 42."
    field.fill("42")
    answer(page, BASE).get_by_role("button", name="Send the correction").click()
    answer(page, BASE).get_by_text("The correction is kept").wait_for()
    [base, shout] = opinions(learner)[:2]
    assert (shout["model"], shout["version"], shout["score"]) == ("shout", 1, 1)
    assert (base["score"], base["corrected"], base["answers"]) == (0, "42", ["17 + 25 = 42."])
    page.get_by_role("link", name="Learning").click()
    page.locator("#feedback .corrected", has_text="42").wait_for()


def test_the_audit_names_the_version_of_each_token(opened: Opened, learner: RunningServer) -> None:
    page = opened.go("#playground")
    page.get_by_text("Options").click()
    page.get_by_label("Let answers of the trained adapter go on under newer versions").check()
    with page.expect_request(lambda asked: '"model":"policy"' in (asked.post_data or "")) as sent:
        ask(page, "policy", BASE)
    assert sent.value.post_data_json["swap_policy"] == "inflight_keep"
    for model, version in (("policy", learner.client.get("/v1/adapters/policy").json()["id"]), (BASE, "the base")):
        card = answer(page, model)
        card.get_by_role("button", name="Audit").click()
        tokens = card.locator(".tokens span")
        assert tokens.count() > 3
        assert str(tokens.first.get_attribute("title")).startswith(f"{version}, probability ")
        assert f"made all {tokens.count()} tokens" in card.locator(".origin p").first.inner_text()


def test_a_request_as_a_command_and_its_fields(opened: Opened, learner: RunningServer) -> None:
    page = opened.go("#playground")
    page.get_by_text("Options").click()
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    page.get_by_label("JSON schema of the answer").fill("{")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text("The JSON schema is not JSON").wait_for()
    page.get_by_label("JSON schema of the answer").fill(json.dumps(schema))
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Most tokens").fill("40")
    page.get_by_label("Seed").fill("7")
    ask(page, BASE)
    assert json.loads(answer(page, BASE).locator(".text").inner_text()).keys() == {"sum"}
    answer(page, BASE).get_by_role("button", name="curl").click()
    words = shlex.split(page.get_by_role("textbox", name="Command").input_value().replace("\\\n", " "))
    sent = json.loads(words[-1])
    assert (sent["model"], sent["seed"], sent["max_tokens"], sent["temperature"]) == (BASE, 7, 40, 0)
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert b"[DONE]" in curl(words, int(learner.url.rpartition(":")[2]))
    page.get_by_role("button", name="Close").click()


def test_a_tool_is_called(opened: Opened) -> None:
    page = opened.go("#playground")
    page.get_by_text("Options").click()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_score", "parameters": parameters}}
    page.get_by_label("Tools").fill(json.dumps([tool]))
    ask(page, BASE, question="What is the score in Oslo?")
    assert answer(page, BASE).locator(".calls code").inner_text() == 'get_score({"city": "Oslo"})'
    assert "calls a tool" in answer(page, BASE).locator(".stats").inner_text()


def test_what_the_server_refuses_is_said_in_its_words(opened: Opened) -> None:
    opened.refuses = True
    page = opened.go("#playground")
    page.get_by_label("Another model or version").fill("shuot")
    page.get_by_role("button", name="Add").click()
    ask(page, "shuot")
    assert "the model 'shuot' does not exist" in answer(page, "shuot").locator(".error").inner_text()


def test_loading_going_back_and_unloading(opened: Opened, learner: RunningServer, root: Path) -> None:
    learner.client.delete("/v1/adapters/moves")
    page = opened.go("#adapters")
    page.get_by_label("Name", exact=True).fill("moves")
    page.get_by_role("button", name="Load", exact=True).click()
    page.get_by_text("was loaded and is current").wait_for()
    assert answered(learner, "moves") == '{"answer": 42}'
    shutil.rmtree(root / "moves")
    shutil.copytree(demo.ADAPTER_PATHS["shout"], root / "moves")
    learner.client.post("/v1/adapters", json={"name": "moves"})
    assert answered(learner, "moves") == "17 + 25 = 42!"
    row = page.locator("#adapter-table tr", has=page.get_by_role("rowheader", name="moves"))
    first, second = learner.client.get("/v1/adapters").json()["adapters"][-1]["versions"]
    row.locator("option", has_text=f"{second}, current").wait_for(state="attached")
    page.get_by_label("Version of moves").select_option(str(first))
    page.get_by_role("button", name="Roll back moves").click()
    page.get_by_text(f"moves now stands for moves@{first}").wait_for()
    assert answered(learner, "moves") == '{"answer": 42}'
    row.locator("option", has_text=f"{first}, current").wait_for(state="attached")
    page.get_by_role("button", name="Unload moves").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Unload moves").click()
    page.locator("#sure-yes").click()
    page.get_by_text("moves was unloaded").wait_for()
    assert "moves" not in [each["name"] for each in learner.client.get("/v1/adapters").json()["adapters"]]


def test_learning_is_shown_paused_and_taken_back(opened: Opened, learner: RunningServer) -> None:
    for _ in range(2):
        update = {"trajectories": trajectories(), "wait": True}
        assert learner.client.post("/v1/training/update", json=update).json()["status"] == "succeeded"
    page = opened.go("#learning")
    page.locator("#updates tbody tr").first.wait_for()
    shown = page.locator("#updates tbody tr").first.inner_text()
    assert "published" in shown and "ok" in shown
    assert page.locator("#reward-plot canvas").count() == page.locator("#loss-plot canvas").count() == 1
    page.get_by_role("button", name="Pause learning").click()
    page.get_by_role("button", name="Continue learning").wait_for()
    assert learner.client.get("/v1/training/status").json()["running"] is False
    page.get_by_role("button", name="Continue learning").click()
    page.get_by_role("button", name="Pause learning").wait_for()
    page.locator("#back-to option[value='2']").wait_for(state="attached")
    page.locator("#back-to").select_option("2")
    page.get_by_role("button", name="Roll back", exact=True).click()
    page.locator("#sure-yes").click()
    page.get_by_text("Back at policy@2").wait_for()
    assert learner.client.get("/v1/training/status").json()["current_lora"] == "policy@2"


def test_the_routes_are_shown(opened: Opened) -> None:
    page = opened.go("docs")
    page.get_by_text("/v1/chat/completions", exact=True).click()
    temperature = page.get_by_role("row", name="temperature").first
    assert "0 to 2" in temperature.inner_text()
    page.get_by_label("Show routes with").fill("rollback")
    assert page.locator(".route:visible").count() == 1


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with scripted_server(api_key=KEY) as (client, _, _):
        yield str(client.base_url).rstrip("/")


def test_a_server_with_a_key_is_asked_with_it(chromium: Browser, locked: str) -> None:
    profile = chromium.new_context()
    page = profile.new_page()
    page.goto(f"{locked}/")
    page.get_by_role("heading", name="This server asks for a key").wait_for()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("a valid API key is needed").wait_for()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#state[data-status=ok]").wait_for()
    assert page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]") == [
        [KEY],
        0,
        "",
    ]
    page.goto(f"{locked}/docs")
    page.locator(".route").first.wait_for()
    page.get_by_role("button", name="Forget the key").click()
    page.get_by_role("heading", name="This server asks for a key").wait_for()
    profile.close()


def test_a_key_that_does_not_open_everything_still_opens_the_rest(opened: Opened) -> None:
    opened.refuses = True
    page = opened.page
    refusal = {"error": {"message": "this key is not for metrics", "type": "permission_error"}}
    page.route("**/v1/overview", lambda route: route.fulfill(status=403, json=refusal))
    page.goto(f"{opened.url}/")
    page.get_by_text("this key is not for metrics").wait_for()
    page.get_by_role("link", name="Playground").click()
    ask(page, "shout")
    assert not page.locator("#notice").is_visible()


def test_by_keyboard_only(opened: Opened, learner: RunningServer) -> None:
    page = opened.go()
    press = page.keyboard.press

    def tab_to(name: str) -> None:
        for _ in range(80):
            press("Tab")
            focused = page.evaluate(
                "() => { const e = document.activeElement; return [(e.labels?.[0] ?? e).textContent.trim(),"
                " getComputedStyle(e.closest('.chip') ?? e).outlineStyle]; }"
            )
            if focused[0] == name:
                assert focused[1] != "none", f"nobody sees that {name} has the focus"
                return
        raise AssertionError(f"Tab does not reach {name}")

    tab_to("Skip to the content")
    tab_to("Playground")
    press("Enter")
    page.locator("#models input").first.wait_for()
    tab_to("json")
    press("Space")
    tab_to("Question")
    press("ControlOrMeta+a")
    page.keyboard.type("What is 1 + 2?")
    press("ControlOrMeta+Enter")
    page.locator("#progress", has_text="answered").wait_for()
    assert page.locator(".answer").count() == 2
    tab_to("Good")
    press("Enter")
    page.get_by_text("It is kept").wait_for()
    assert opinions(learner)[0]["score"] == 1


@pytest.mark.parametrize(
    "opened", [{}, DARK, NARROW | {"reduced_motion": "reduce"}], indirect=True, ids=["light", "dark", "narrow"]
)
def test_nothing_keeps_anybody_out(opened: Opened) -> None:
    """axe-core finds nothing serious in any view, and nothing is wider than the screen."""
    for view in VIEWS:
        page = opened.go(view)
        if view == "#playground":
            ask(page, BASE, "shout")
            for card in page.locator(".answer").all():
                card.get_by_role("button", name="Audit").click()
                card.get_by_role("button", name="Correct", exact=True).click()
            page.get_by_text("Options").click()
        elif view == "docs":
            page.locator(".route summary").first.click()
        else:
            page.locator(f"{view} :is(table, dd, canvas)").first.wait_for()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run()")["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert not [(view, v["id"], [node["target"] for node in v["nodes"]]) for v in serious]
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


@pytest.mark.parametrize("opened", [DARK], indirect=True)
def test_it_is_dark_where_people_want_it_dark(opened: Opened) -> None:
    page = opened.go()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 22)"
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(247, 247, 245)"


def test_quantiles(opened: Opened) -> None:
    page = opened.go()
    found = page.evaluate(
        """async () => {
          const { quantile } = await import(new URL("page/series.js", document.baseURI));
          return [[[1, 2, 4], [0, 10, 0, 0], 0.5], [[1, 2, 4], [5, 5, 0, 0], 0.75], [[1, 2, 4], [0, 0, 0, 3], 0.5],
            [[1, 2], [0, 0, 0], 0.5]].map((given) => quantile(...given));
        }"""
    )
    assert found == [1.5, 1.5, 4, None]


@pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed")
def test_images_are_sent_where_the_model_reads_them(
    chromium: Browser, scripted_folder: Callable[[scripted_model.Script], Path], tmp_path: Path
) -> None:
    folder = scripted_folder(scripted_model.Script(says={scripted_model.IMAGE: "It is a picture."}, sees=True))
    (tmp_path / "fox.png").write_bytes(picture(8, 8))
    with serving(scripted_model.config(folder)) as server:
        profile = chromium.new_context()
        page = profile.new_page()
        page.goto(f"{server.url}/#playground")
        page.get_by_text("Options").click()
        page.get_by_label("Images").set_input_files(tmp_path / "fox.png")
        page.locator("#thumbs img").wait_for()
        [model] = [each["id"] for each in server.client.get("/v1/models").json()["data"]]
        ask(page, model, question="What do you see?")
        assert answer(page, model).locator(".text").inner_text() == "It is a picture."
        profile.close()
