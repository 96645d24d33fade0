"""Model and adapter folders: one that exists, or an id of the Hugging Face hub, fetched before anything serves.

Only weights, settings and templates are fetched; never code, nor formats that can carry it.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,255}))?", re.ASCII)
"""`organisation/name`, or with a branch, a tag or a commit behind an `@`."""

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
IGNORED = ["*/*"]  # what lies in folders is the same model in other formats, or earlier states of it


class HubError(Exception):
    """Neither a folder nor something that could be fetched; one line that says what to do."""


@dataclass(frozen=True)
class Found:
    folder: Path
    id: str  # of the hub, without a revision; empty for a folder that was given


def find(text: str, what: str) -> Found:
    """The folder that `text` means. `what` says for the message what it would be, such as "model"."""
    if Path(text).is_dir():
        return Found(Path(text), "")
    match = ID.fullmatch(text)
    if match is None:
        raise HubError(f"there is no {what} folder {text}")
    return Found(_fetch(match[1], match[2], f"there is no {what} folder {text}, and"), match[1])


def close() -> None:
    """Neither this process nor those it starts fetch anything from here on: a folder that names an id opens no
    connection."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True


def _fetch(repo: str, revision: str | None, otherwise: str) -> Path:
    """From the hub or its cache on this machine, with a progress bar."""
    from huggingface_hub import constants, errors, get_token, snapshot_download

    hub = constants.ENDPOINT
    at = f"{repo}@{revision}" if revision else repo
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=WANTED, ignore_patterns=IGNORED)
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
    except Exception as e:  # the client's HTTP library, the disk: whatever it is, the user needs its one line
        raise HubError(f"{otherwise} {at} could not be fetched from {hub}: {type(e).__name__}: {_line(e)}") from None
    return Path(folder)


def _line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
