"""`tandem pull`: fetches a model from the Hugging Face hub, and goes on where an earlier attempt was interrupted.

Large files come in pieces into the hub's own cache, under names that its client does not know; that client then adds
the small files and puts everything together.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_tandem.cli import hub
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.daemon import INTERRUPTED

PIECE = 1 << 20
"""Bytes of a piece, the most that an interruption loses."""

ATTEMPTS = 5
"""Attempts to go on with a file of which nothing more comes, a second apart."""

PAUSE_SECONDS = 1.0
"""Seconds between two attempts."""

PARTIAL_CONTENT = 206
"""Status of an answer with the part of a file that was asked for."""

WIDE = 60
"""Columns of a terminal from which speed and time have room beside the bar."""

PARTIAL = ".tandem-partial"
"""End of the name of a file of which a part is there."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a drive, a quota or a limit that is reached."""

SHA256 = re.compile(r"[0-9a-f]{64}")
"""Pattern of the hashes by which the hub knows large files."""


@dataclass(frozen=True)
class MissingFile:
    """A large file that is not there yet."""

    url: str
    blob: Path
    """Its place in the hub's cache, whose name is its hash."""
    size: int

    @property
    def partial(self) -> Path:
        """The place of its first bytes until it is whole."""
        return self.blob.with_name(self.blob.name + PARTIAL)

    @property
    def there(self) -> int:
        """How many of its bytes are there."""
        return self.partial.stat().st_size if self.partial.exists() else 0


def pull(model: str, as_json: bool) -> None:
    """Fetch a model, show how far it is, and print where it is. End the process with one line if that fails."""
    match = hub.ID.fullmatch(model)
    if match is None:
        fail(f"'{model}' is not the id of a model on the hub, such as organisation/name or organisation/name@revision")
    repo, revision = match[1], match[2]
    try:
        with hub.explained(repo, revision, f"{model} was not fetched:"):
            folder = _pull(repo, revision)
    except hub.HubError as e:
        fail(str(e))
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        raise SystemExit(INTERRUPTED) from None
    size = sum(file.stat().st_size for file in folder.iterdir())
    if as_json:
        print(json.dumps({"id": model, "folder": str(folder), "bytes": size}, indent=2))
    else:
        print(f"{model} is in {folder} ({size / 1e9:.2f} GB)\ntry: tandem serve {model}")


def _pull(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    parts = _missing(repo, revision)
    left = sum(part.size - part.there for part in parts)
    if parts:
        folder = parts[0].blob.parent
        free = shutil.disk_usage(folder).free
        if left > free:
            raise hub.HubError(
                f"{repo} was not fetched: {left / 1e9:.2f} GB are missing, and the drive of {folder} has "
                f"{free / 1e9:.2f} GB left; HF_HOME names another folder"
            )
    with _progress(sum(part.size for part in parts), sum(part.there for part in parts)) as advance:
        for part in parts:
            try:
                _fetch(part, advance)
            except OSError as e:
                if e.errno not in NO_ROOM:
                    raise
                raise hub.HubError(
                    f"{repo} was not fetched: there is no room left in {part.blob.parent}; make room, or name another "
                    f"folder with HF_HOME"
                ) from None
    return Path(snapshot_download(repo, revision=revision, allow_patterns=hub.WANTED, ignore_patterns=hub.IGNORED))


def _missing(repo: str, revision: str | None) -> list[MissingFile]:
    """Return the large files of a model that are not in the hub's cache; none if the hub is not to be asked."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    if constants.HF_HUB_OFFLINE:
        return []
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    large = {file.rfilename: file.lfs for file in info.siblings or () if file.lfs is not None}
    parts = [
        MissingFile(hf_hub_url(repo, name, revision=info.sha), blobs / large[name].sha256, large[name].size)
        for name in large
        if hub.is_wanted(name) and SHA256.fullmatch(large[name].sha256) and not (blobs / large[name].sha256).exists()
    ]
    if parts:
        blobs.mkdir(parents=True, exist_ok=True)
    return parts


def _fetch(part: MissingFile, advance: Callable[[int], None]) -> None:
    """Fetch what is missing of a file, and give it its name once it is whole and its hash is right.

    Raise HubError if it breaks off again and again, or has another hash than the hub gives for it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    attempts = ATTEMPTS
    while part.there < part.size:
        before = part.there
        try:
            _fetch_more(part, advance)
        except (OSError, HfHubHTTPError):
            raise
        except Exception as e:  # a break of the connection, whose type is one of the hub's HTTP library
            attempts = ATTEMPTS if part.there > before else attempts - 1
            if not attempts:
                raise hub.HubError(
                    f"{part.url} breaks off after {part.there:,} of {part.size:,} bytes ({type(e).__name__}); the same "
                    f"command goes on from here"
                ) from None
            time.sleep(PAUSE_SECONDS)
    with part.partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != part.blob.name:
        part.partial.unlink()
        raise hub.HubError(f"{part.url} does not have the hash that the hub gives for it; it was removed: try again")
    part.partial.replace(part.blob)


def _fetch_more(part: MissingFile, advance: Callable[[int], None]) -> None:
    """Append to a file what one answer of the hub has of its rest."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils._headers import build_hf_headers

    there = part.there
    headers = build_hf_headers() | {"Range": f"bytes={there}-", "Accept-Encoding": "identity"}
    with get_session().stream("GET", part.url, headers=headers) as answer:
        hf_raise_for_status(answer)
        if answer.status_code != PARTIAL_CONTENT:  # the whole file comes again
            advance(-there)
            part.partial.unlink(missing_ok=True)
        with part.partial.open("ab") as file:
            for piece in answer.iter_raw(PIECE):
                file.write(piece)
                file.flush()
                advance(len(piece))


@contextmanager
def _progress(size: int, there: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how much of `size` bytes is there, and yield the function that counts more of them.

    Elsewhere there is one line at the beginning.
    """
    if not size:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        begun = f", of which {there / 1e6:,.1f} MB are there" if there else ""
        say(f"fetching {size / 1e6:,.1f} MB{begun} …")
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    # The columns on the right are left out where the terminal is narrow.
    console = Console(stderr=True)
    more = [TransferSpeedColumn(), TimeRemainingColumn()] if console.width >= WIDE else []
    with Progress(BarColumn(), DownloadColumn(), *more, console=console, transient=True) as bar:
        task = bar.add_task("", total=size, completed=there)
        yield lambda count: bar.advance(task, count)
