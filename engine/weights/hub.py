"""Hub ids, `org/name` or `org/name@revision`. Models are stored in the usual Hugging Face cache, which also works offline."""

import re
from pathlib import Path

from engine.utils.one_line import one_line
from engine.weights.errors import WeightsError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]  # no pickles: loading one runs code


def is_hub_id(reference: str) -> bool:
    """Return whether a reference has the form of a hub id; paths that begin with `.`, `/` or `~` do not."""
    return not reference.startswith((".", "/", "~")) and _HUB_ID.fullmatch(reference) is not None


def snapshot(reference: str) -> Path:
    """Return the local folder of a hub id, downloaded if needed; raise WeightsError if neither the hub nor the cache has it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    match = _HUB_ID.fullmatch(reference)
    assert match is not None, reference
    try:
        return Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = one_line(error)
        raise WeightsError(f"cannot get {reference} from the hub or its local cache: {reason}") from error
