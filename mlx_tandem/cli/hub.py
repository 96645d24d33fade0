"""Finds model and adapter folders: a folder that exists, or an id of the Hugging Face hub, which is fetched at
start.

Only weights, settings and templates are fetched; never code, nor formats that can carry it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec.structs import replace

from mlx_tandem.config import EngineConfig
from mlx_tandem.training.cluster import bases

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""Pattern of the name of a repository, `organisation/name`."""

ID = re.compile(rf"({REPOSITORY.pattern})(?:@(?!.*\.\.)([\w./-]{{1,255}}))?", re.ASCII)
"""Pattern of a hub id: a repository, optionally followed by `@` and a branch, tag or commit."""

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files that are fetched."""

IGNORED = ["*/*"]
"""Files that are not fetched: subfolders hold the same model in other formats, or earlier states of it."""


MOST_SMALL = 64 << 20
"""Most bytes of all files of a model that are fetched in order to learn their hashes."""


class HubError(Exception):
    """The text is neither a folder nor a hub id that could be fetched. The message is one line that says what to do."""


@dataclass(frozen=True)
class Found:
    """A folder that was found."""

    folder: Path
    id: str  # its hub id without a revision; empty for a folder that was given


def is_wanted(name: str) -> bool:
    """Return whether a file of a repository is fetched."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in WANTED)


def find(text: str, what: str, wanted: Sequence[str] = WANTED) -> Found:
    """Return the folder that `text` names. `what` says in errors what it should be, such as "model".

    Of an id only files whose names match a pattern of `wanted` are fetched. Raise HubError if there is no such folder
    and no such id.
    """
    if Path(text).is_dir():
        return Found(Path(text), "")
    match = ID.fullmatch(text)
    if match is None:
        raise HubError(f"there is no {what} folder {text}")
    return Found(_fetch(match[1], match[2], f"there is no {what} folder {text}, and", wanted), match[1])


def find_base(repo: str, sha256: str) -> Path:
    """Return the folder of a repository that another machine names as its base model, whose digest is `sha256`.

    The digest (training/cluster/bases.py) is computed from what the hub says before weights are fetched: it knows the
    hashes of large files, and of small ones at most MOST_SMALL bytes are fetched. Raise HubError for what is no name of
    a repository, and unless the digest is this one.
    """
    if not REPOSITORY.fullmatch(repo):
        raise HubError(f"the leader's base model has the hub id {repo!a}, which is not like organisation/name")
    from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download

    otherwise = f"the leader's base model {repo} is not on this machine, and"
    with explained(repo, None, otherwise):
        try:
            there = snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=IGNORED, local_files_only=True)
            if bases.digest(Path(there)) == sha256:
                return Path(there)
        except errors.LocalEntryNotFoundError:
            pass
        info = HfApi().model_info(repo, files_metadata=True)
        files = [f for f in info.siblings or () if "/" not in f.rfilename and f.rfilename.endswith(bases.SUFFIXES)]
        if sum(MOST_SMALL + 1 if f.size is None else f.size for f in files if f.lfs is None) <= MOST_SMALL:
            hashes = {
                f.rfilename: f.lfs.sha256
                if f.lfs
                else bases.hash_file(Path(hf_hub_download(repo, f.rfilename, revision=info.sha)))
                for f in files
            }
            if bases.combined(hashes) == sha256:
                return _fetch(repo, info.sha, otherwise)
    raise HubError(f"{otherwise} the files of {repo} on the hub are not the leader's")


def find_models(engine: EngineConfig) -> tuple[EngineConfig, Found]:
    """Return the engine's settings with the folders of its models, and what was found as its model. Raise HubError."""
    model, drafts = find(engine.model.path, "model"), engine.speculation
    if drafts.method == "draft" and drafts.draft_model:
        drafts = replace(drafts, draft_model=str(find(drafts.draft_model, "draft model").folder))
    return replace(engine, model=replace(engine.model, path=str(model.folder)), speculation=drafts), model


def close() -> None:
    """Stop this process and those it starts from fetching anything, so that a folder that names an id opens no
    connection.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True


def _fetch(repo: str, revision: str | None, otherwise: str, wanted: Sequence[str] = WANTED) -> Path:
    """Return the folder of a repository, from the hub or from its cache on this machine; show a progress bar."""
    from huggingface_hub import snapshot_download

    with explained(repo, revision, otherwise):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=IGNORED))


@contextmanager
def explained(repo: str, revision: str | None, otherwise: str) -> Iterator[None]:
    """Raise HubError in place of what the hub's client raises inside the block; its line begins with `otherwise`."""
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    at = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"{otherwise} {hub}/{repo} asks for terms to be accepted: accept them there, then set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{otherwise} {hub}/{repo} has no revision '{revision or 'main'}'") from None
    except errors.RepositoryNotFoundError:
        who = "with this HF_TOKEN" if get_token() else "without HF_TOKEN"
        raise HubError(f"{otherwise} {hub} has no {repo} that can be read {who}") from None
    except errors.HFValidationError as e:
        raise HubError(f"{otherwise} {_line(e)}") from None
    except errors.IncompleteSnapshotError:
        raise HubError(f"{otherwise} {hub} cannot be reached; of {at} only a part was fetched earlier") from None
    except errors.LocalEntryNotFoundError as e:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
        if isinstance(e.__cause__, errors.HfHubHTTPError):
            why = f"{hub} answered with {e.__cause__.response.status_code}"
        raise HubError(f"{otherwise} {at} is not on this machine and {why}") from None
    except errors.HfHubHTTPError as e:
        status = e.response.status_code
        if status in (401, 403):
            raise HubError(f"{otherwise} {hub} does not accept HF_TOKEN for {at} ({status})") from None
        raise HubError(f"{otherwise} {hub} answered with {status}") from None
    except Exception as e:  # the client's HTTP library or the disk may fail in any way; the user needs one line
        raise HubError(f"{otherwise} {at} could not be fetched from {hub}: {type(e).__name__}: {_line(e)}") from None


def _line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
