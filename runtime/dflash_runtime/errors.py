"""One error family: every mistake a user can make ends in one of these, with the values and the way out."""


class DFlashError(Exception):
    """A mistake the user can mend; the command prints it in one line and exits non-zero."""


class BundleError(DFlashError):
    """A bundle is missing, incomplete, altered, or written by a newer version."""


class CheckpointError(DFlashError):
    """A checkpoint folder or hub repository cannot be read as a target or a drafter."""


class UnsupportedModelError(DFlashError):
    """The model is of a kind this tool does not export; the message names the kind."""


class PairError(DFlashError):
    """Target and drafter do not fit each other; the message carries both values."""


class ParityError(DFlashError):
    """A check against the reference failed; the message names the first tensor that diverges."""


class EngineError(DFlashError):
    """A lowered graph or engine is missing, incomplete, or made for something else."""


class BackendError(DFlashError):
    """The backend asked for is not available here."""


class PromptError(DFlashError):
    """A prompt, a message list or a generation option cannot be used."""


class NumericsError(DFlashError):
    """The model produced logits that are not finite, so no token can be chosen."""


class OutputError(DFlashError):
    """The output place cannot be written: it exists, is read-only, or the disk is full."""
