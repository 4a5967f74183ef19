"""Checkpoints from the Hugging Face hub: pinned to a commit, from the cache alone where there is no network."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from dflash_export.tensor_files import TensorPlace

# A learned mask embedding is no safetensors file, and a drafter that has one drafts badly without it.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "mask_embedding.pt"]
_WEIGHT_FILES = ["*.safetensors"]
# Second copies of the weights in layouts of their own.
_SECOND_COPIES = ["consolidated*.safetensors", "*/*.safetensors"]
_OFFLINE_HINT = "Connect once, or give a folder."


def download(
    repo: str, revision: str | None, *, local_files_only: bool = False, with_weights: bool = True
) -> tuple[Path, str | None]:
    """Brings a checkpoint into the local cache, or finds it there.

    The environment's HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN are honoured by the client.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit; None for the default branch.
        local_files_only: Use the cache alone.
        with_weights: Bring the weights too.

    Returns:
        The folder, and the commit it is of, so that it can be asked for again.

    Raises:
        CheckpointError: no such repository or revision, a gate, no network, or a failed transfer; each says what to do.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[*_SMALL_FILES, *(_WEIGHT_FILES if with_weights else ())],
                ignore_patterns=_SECOND_COPIES,
                local_files_only=local_files_only,
            )
        )
    return folder, folder.name if _is_commit(folder.name) else revision


def download_config(repo: str, revision: str | None) -> Path:
    """Brings a repository's config.json alone, or finds it in the local cache; arguments and errors as `download`."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, "config.json", revision=revision))


def tensor_headers(repo: str, revision: str | None) -> dict[str, TensorPlace] | None:
    """Names, dtypes and shapes of a repository's tensors; their values stay on the hub and cannot be read.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit; None for the default branch.

    Returns:
        None where the weight files have names of their own, which the hub's client does not look for.

    Raises:
        CheckpointError: as `download`.
    """
    from huggingface_hub import errors, get_safetensors_metadata

    from dflash_export.tensor_files import TensorPlace

    with _explained(repo, revision):
        try:
            files = get_safetensors_metadata(repo, revision=revision).files_metadata
        except errors.NotASafetensorsRepoError:
            return None
    return {
        name: TensorPlace(Path(file), begin, end - begin, str(tensor.dtype), tuple(tensor.shape))
        for file, metadata in files.items()
        for name, tensor in metadata.tensors.items()
        for begin, end in (tensor.data_offsets,)
    }


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub's client raises into one line that says what to do."""
    from huggingface_hub import errors

    wanted = repo if revision is None else f"{repo}@{revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{wanted} is gated: its owner wants its terms accepted. Accept them at https://huggingface.co/{repo} with "
            "your account, log in here with `hf auth login` (or set HF_TOKEN), and run the command again."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}. See https://huggingface.co/{repo}.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no {wanted} on the Hugging Face hub, or it is private: check the name, or `hf auth login`."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{wanted} is not in the local Hugging Face cache and the hub cannot be reached. {_OFFLINE_HINT}"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"{wanted} is not in the local Hugging Face cache and HF_HUB_OFFLINE forbids the hub. {_OFFLINE_HINT}"
        ) from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError) as error:
        raise CheckpointError(f"downloading {wanted} failed: {str(error).splitlines()[0]}") from error


def _is_commit(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", name) is not None
