"""The page's files as a browser gets them, without a browser: who gets them, their headers, and what they refer to."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from mlx_tandem.server import page
from tests.api.scripted import scripted_server

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "mlx_tandem" / "server" / "page" / "static"
OWN = sorted(path for path in FOLDER.iterdir() if not path.name.startswith("uplot"))
MODULES = [path for path in OWN if path.suffix == ".js"]
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = "k" * 20
UPLOT = "19c8d4c6ad88929a79f4ae49"
"""The beginning of the SHA-256 of uPlot 1.6.32's dist/uPlot.iife.min.js, as its package has it."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with scripted_server() as (client, _, _):
        yield client


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with scripted_server(api_key=KEY) as (client, _, _):
        yield client


@pytest.mark.parametrize("path", page.DOCUMENTS)
def test_browsers_get_the_page_and_everybody_else_the_same_json_as_before(client: httpx.Client, path: str) -> None:
    shown = client.get(path, headers=BROWSER)
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert shown.content == (FOLDER / page.DOCUMENTS[path]).read_bytes()
    for accepts in ("*/*", "application/json", ""):
        plain = client.get(path, headers={"accept": accepts})
        assert (plain.status_code, plain.json()["error"]["code"]) == (404, "not_found")
    assert client.post(path, headers=BROWSER).status_code == 404


def test_the_page_needs_no_key_and_everything_else_does(guarded: httpx.Client) -> None:
    for path in [*page.DOCUMENTS, *(page.PREFIX + name for name in page.FILES)]:
        assert guarded.get(path, headers=BROWSER).status_code == 200
    for path in ("/", "/docs", "/page/", "/page/nothing.js", "/v1/overview", "/openapi.json"):
        assert guarded.get(path).status_code == 401
    assert guarded.get("/v1/overview", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_every_file_has_its_type_and_the_policy(client: httpx.Client) -> None:
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
    for name in page.FILES:
        reply = client.get(page.PREFIX + name)
        assert reply.content == (FOLDER / name).read_bytes()
        assert reply.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_a_browser_that_has_a_file_is_not_sent_it_again(client: httpx.Client) -> None:
    first = client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert client.get("/page/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    head = client.head("/page/main.js")
    assert (head.headers["content-length"], head.content) == (str(len(first.content)), b"")


def test_the_page_lies_under_the_prefix_of_a_proxy() -> None:
    with scripted_server(root_path="/llm") as (client, _, _):
        assert client.get("/llm/", headers=BROWSER).headers["content-type"].startswith("text/html")
        assert client.get("/llm/page/main.js").status_code == client.get("/llm/v1/overview").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page", "/page/index.html", "/page/static/main.js", "/page/../__init__.py", "/page/%2e%2e/__init__.py"],
)
def test_only_names_of_the_table_are_served(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers=BROWSER).status_code == 404


def test_the_table_has_every_file_and_the_wheel_too() -> None:
    from hatchling.builders.wheel import WheelBuilder

    files = {path.name for path in FOLDER.iterdir()}
    assert files == {*page.FILES, *page.DOCUMENTS.values()}
    builder = WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    assert {f"mlx_tandem/server/page/static/{name}" for name in files} <= packed


class Elements(HTMLParser):
    """What a document refers to, and what would need a weaker policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.wanted: set[str] = set()  # ids that labels and descriptions name
        self.links: set[str] = set()
        self.inline: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update([given["id"]] if "id" in given else [])
        for name in ("for", "list", "aria-labelledby", "aria-describedby"):
            self.wanted.update(given.get(name, "").split())
        self.links.update(given[name] for name in ("src", "href") if name in given)
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []


@pytest.mark.parametrize("name", page.DOCUMENTS.values())
def test_a_document_is_whole(name: str) -> None:
    found = Elements((FOLDER / name).read_text(encoding="utf-8"))
    assert not found.inline
    assert not [name for name, count in found.ids.items() if count > 1]
    assert found.wanted <= found.ids.keys()
    served = {f"page/{file}" for file in page.FILES}
    assert {link for link in found.links if link.startswith("page/")} <= served
    others = {link for link in found.links if not link.startswith(("page/", "#", "./"))}
    assert others <= {"docs", "openapi.json"}


def test_modules_find_what_they_ask_for() -> None:
    used: set[str] = set()
    for start, document in (("main.js", "index.html"), ("docs.js", "docs.html")):
        there = Elements((FOLDER / document).read_text(encoding="utf-8")).ids.keys()
        reached: set[str] = set()
        todo = [start]
        while todo:
            if (module := todo.pop()) not in reached:
                reached.add(module)
                todo += re.findall(r'from "\./([a-z]+\.js)"', (FOLDER / module).read_text(encoding="utf-8"))
        used |= reached
        assert reached <= set(page.FILES)
        if start == "main.js":
            texts = "".join((FOLDER / module).read_text(encoding="utf-8") for module in reached)
            assert set(re.findall(r'byId\("([a-z0-9-]+)"\)', texts)) <= there
    assert used == {path.name for path in MODULES}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere_and_no_text_becomes_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|\burl\(", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage", text
    )


def test_the_plots_are_those_of_the_published_package() -> None:
    program = (FOLDER / "uplot.js").read_bytes()
    assert hashlib.sha256(program).hexdigest().startswith(UPLOT)
    assert "MIT License" in (FOLDER / "uplot.LICENSE.txt").read_text(encoding="utf-8")


def test_the_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs").glob("page-*.png"))
    assert len(pictures) == 4
    for picture in pictures:
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 150_000
