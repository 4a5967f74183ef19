"""What the server refuses or fails at, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from dflash_runtime.errors import DFlashError, PromptError


class ApiError(DFlashError):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: What is wrong and what to do.
        param: The request's field at fault.
        code: A word that programs compare with, as `model_not_found`.
        retry_after_s: When to try again, where that may help.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's `type` for the status."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """What goes with it."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**found, "WWW-Authenticate": "Bearer"} if self.status == 401 else found


def wrong_field(name: str, value: object, wanted: str) -> ApiError:
    """A field's value cannot be used."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ApiError(400, f"{name} is {shown} and must be {wanted}.", param=name, code="invalid_value")


def unsupported(name: str, why: str) -> ApiError:
    """A field of OpenAI's API that this server does not act upon."""
    return ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_value")


def as_api_error(error: DFlashError) -> ApiError:
    """The answer to a mistake the runtime found: the client's where it is the prompt or an option, else ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        return ApiError(400, str(error), code="invalid_prompt")
    return ApiError(500, str(error), code=type(error).__name__)
