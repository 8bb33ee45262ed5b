"""A hub of models, asked by `huggingface_hub`: its HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE hold here too.

`huggingface_hub` resumes a file within one process only, so the parts of files are kept by our caller
(`instar.pull.download`), and each is asked for from where it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get

from instar.errors import InputError, ServerError
from instar.pull.files import RemoteFile

TIMEOUT_S: Final = 20.0
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
Progress = Callable[[int], None]  # bytes of the file that are there now


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A repository at one commit."""

    repo: str
    commit: str
    files: dict[str, RemoteFile]


class Hub:
    """One hub. Every method raises ServerError or InputError with a sentence that says what to do."""

    def __init__(self, endpoint: str = "") -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._api = HfApi(endpoint=self.endpoint, library_name="instar")

    @property
    def is_offline(self) -> bool:
        return bool(constants.is_offline_mode())

    def snapshot(self, repo: str, revision: str) -> RemoteSnapshot:
        """Return the commit that `revision` is now, and its files."""
        with self._explained(repo, revision):
            try:
                found = self._api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
                files = {file.name: file for file in map(_remote_file, found.siblings or [])}
            except (HFValidationError, HfHubHTTPError):
                raise
            except (ValueError, KeyError, TypeError) as error:
                raise self._not_a_hub(error) from error
        commit = found.sha or ""
        if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
            raise self._not_a_hub(f"{revision} would be commit {commit!r}")
        return RemoteSnapshot(repo, commit, files)

    def download(
        self, snapshot: RemoteSnapshot, file: RemoteFile, out: BinaryIO, have: int, progress: Progress
    ) -> None:
        """Append the bytes of a file from `have` on to `out`, which has those before."""
        url = hf_hub_url(snapshot.repo, file.name, revision=snapshot.commit, endpoint=self.endpoint)
        with self._explained(snapshot.repo, snapshot.commit):
            try:
                http_get(
                    url,
                    out,
                    resume_size=have,
                    headers=self._headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                    tqdm_class=_bars(progress),
                )
            except (HfHubHTTPError, OfflineModeIsEnabled):
                raise
            except OSError as error:
                if error.errno is not None:  # of our own disk
                    raise
                raise ServerError(f"{file.name}: {str(error).splitlines()[0]} Run it again") from error
            except ValueError as error:  # more than the hub sends over HTTP
                raise ServerError(f"{file.name}: {error}") from error

    def _headers(self) -> dict[str, str]:
        """Return the headers of a download. A redirect to another host is followed without the token."""
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        return {"user-agent": "instar"} | ({"authorization": f"Bearer {token}"} if token else {})

    def _not_a_hub(self, why: object) -> ServerError:
        return ServerError(f"{self.endpoint} did not answer as a hub does ({why}); is HF_ENDPOINT right?")

    @contextmanager
    def _explained(self, repo: str, revision: str) -> Iterator[None]:
        try:
            yield
        except HFValidationError as error:
            raise InputError(f"{repo!r} cannot be the name of a repository: {error}") from error
        except GatedRepoError as error:
            raise ServerError(
                f"{repo} asks for consent: accept its terms at {self.endpoint}/{repo}, then set HF_TOKEN to "
                "a token of that account"
            ) from error
        except RepositoryNotFoundError as error:
            raise ServerError(
                f"{self.endpoint} has no model {repo}, or it is private; check the name, and set HF_TOKEN "
                "for a private one"
            ) from error
        except RevisionNotFoundError as error:
            raise ServerError(
                f"{repo} has no revision {revision!r}; name a branch, a tag or a commit"
            ) from error
        except OfflineModeIsEnabled as error:
            raise ServerError(
                f"HF_HUB_OFFLINE is set, so {self.endpoint} is not asked; unset it to pull {repo}"
            ) from error
        except HfHubHTTPError as error:
            status, why = error.response.status_code, error.server_message or error.response.reason_phrase
            raise ServerError(f"{self.endpoint} answers {status} for {repo}: {why}") from error
        except httpx2.HTTPError as error:
            raise ServerError(
                f"no hub answers at {self.endpoint} ({error}); check the network, or name a mirror with "
                "HF_ENDPOINT. What came is kept, and the same command goes on from there"
            ) from error


def _remote_file(sibling: Any) -> RemoteFile:
    """Return a file with its digest. Raises ValueError if the hub does not tell size and digest."""
    if sibling.size is None or not sibling.blob_id:
        raise ValueError(f"no size and digest of {sibling.rfilename}")
    sha256 = sibling.lfs.sha256 if sibling.lfs else ""
    return RemoteFile(sibling.rfilename, sibling.size, sibling.blob_id, sha256)


def _bars(progress: Progress) -> Any:
    """Return what `http_get` takes as its class of progress bars."""

    class Bar:
        def __init__(self, *, initial: int = 0, **_: object) -> None:
            self._done = initial
            progress(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
        ) -> None: ...

        def update(self, count: int) -> None:
            self._done += count
            progress(self._done)

    return Bar
