"""Everything that can go wrong, as one tree with stable codes.

    SlotlineError
    ├── InvalidRequest              the caller's fault; `param` names the field
    │   ├── UnknownModel
    │   ├── ContextLengthExceeded
    │   ├── InvalidGrammar
    │   ├── UnsupportedSchema
    │   ├── UnsupportedField
    │   ├── UnsupportedCapability
    │   ├── ChatTemplateError
    │   └── BodyTooLarge
    ├── NotFound
    │   ├── JobNotFound
    │   ├── FileNotFound
    │   └── BatchNotFound
    ├── Conflict
    │   ├── IdConflict
    │   ├── JobAlreadyEnded
    │   ├── JobNotEnded
    │   └── BatchState
    ├── QueueFull
    ├── Unavailable
    │   ├── RedisUnavailable
    │   ├── StorageUnavailable
    │   └── NoWorker
    └── GenerationError             a job that was accepted and did not end well
        ├── GenerationTimeout
        ├── QueueTimeout
        ├── GrammarDeadEnd
        ├── BadLogits
        ├── DecodeFailed
        ├── DependencyFailed
        ├── JobCancelled
        ├── JobRemoved
        ├── WorkerLost
        └── InternalError

Each error carries a message for people, a `code` for programs and, where one field is to blame, its
name in `param`. The map to HTTP status is `shared/http_status.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SlotlineError(Exception):
    """Root of the tree. `retryable` says whether running the same job again could end differently."""

    code: ClassVar[str] = "slotline_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def to_dict(self) -> dict[str, Any]:
        """The `error` object of the HTTP API, of failed jobs and of answers to questions."""
        return {"message": self.message, "type": self.kind(), "code": self.code, "param": self.param}

    @classmethod
    def kind(cls) -> str:
        """The branch of the tree an error belongs to, such as `invalid_request_error`."""
        branch = next((c for c in cls.__mro__ if SlotlineError in c.__bases__), cls)
        return KINDS.get(branch.__name__, "slotline_error")


class InvalidRequest(SlotlineError):
    """The request cannot be served as it is."""

    code = "invalid_request"


class UnknownModel(InvalidRequest):
    """No worker has ever served a model of this name."""

    code = "model_not_found"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the tokens one request may use."""

    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """The grammar does not parse or is beyond our limits."""

    code = "invalid_grammar"


class UnsupportedSchema(InvalidRequest):
    """A JSON schema holds what cannot be enforced; `param` is the path of the keyword."""

    code = "unsupported_schema"


class UnsupportedField(InvalidRequest):
    """A field that would change the answer and that is not served here."""

    code = "unsupported_field"


class UnsupportedCapability(InvalidRequest):
    """The model cannot do what is asked: tools, embeddings, answers."""

    code = "unsupported_capability"


class ChatTemplateError(InvalidRequest):
    """The model has no chat template, or the template refused the messages."""

    code = "chat_template_error"


class BodyTooLarge(InvalidRequest):
    """The HTTP body is larger than `max_body_bytes`."""

    code = "body_too_large"


class NotFound(SlotlineError):
    """There is nothing at this address."""

    code = "not_found"


class JobNotFound(NotFound):
    """No such job: it never existed, was erased, or its record has expired."""

    code = "job_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}: it never existed, was erased or has expired", "id")


class FileNotFound(NotFound):
    """No such file: it never existed, was deleted or has expired."""

    code = "file_not_found"

    def __init__(self, file_id: str, param: str = "file_id") -> None:
        super().__init__(f"there is no file {file_id!r}: it never existed, was deleted or has expired", param)


class BatchNotFound(NotFound):
    """No such batch: it never existed or has expired."""

    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id!r}: it never existed or has expired", "batch_id")


class Conflict(SlotlineError):
    """The request contradicts what is stored."""

    code = "conflict"


class IdConflict(Conflict):
    """The id or the idempotency key belongs to a job with another body."""

    code = "id_conflict"


class JobAlreadyEnded(Conflict):
    """The job's state does not allow what was asked."""

    code = "job_already_ended"


class JobNotEnded(Conflict):
    """What was asked is only possible once the job has ended."""

    code = "job_not_ended"


class BatchState(Conflict):
    """The batch's state does not allow what was asked."""

    code = "batch_state"


class QueueFull(SlotlineError):
    """The model's queue is at `max_queue`; try again after `retry_after_s`."""

    code = "queue_full"
    retry_after_s = 5

    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(SlotlineError):
    """Something behind the API is not there now."""

    code = "unavailable"


class RedisUnavailable(Unavailable):
    """Redis does not answer, refuses writes or is full."""

    code = "redis_unavailable"


class StorageUnavailable(Unavailable):
    """Where the files are cannot be reached, refuses us or is full."""

    code = "storage_unavailable"


class NoWorker(Unavailable):
    """No live worker answered."""

    code = "no_worker"


class GenerationError(SlotlineError):
    """An accepted job that failed."""

    code = "generation_error"


class GenerationTimeout(GenerationError):
    """The job used up its `timeout_s` of time in a slot."""

    code = "timeout"


class QueueTimeout(GenerationError):
    """The job waited longer than its `queue_timeout_s` and was never started."""

    code = "queue_timeout"


class GrammarDeadEnd(GenerationError):
    """The grammar allows no token of the vocabulary here and is not complete."""

    code = "grammar_dead_end"


class BadLogits(GenerationError):
    """The model computed no finite logit for this job."""

    code = "bad_logits"


class DecodeFailed(GenerationError):
    """llama.cpp failed a forward pass that this job took part in."""

    code = "decode_failed"
    retryable = True


class DependencyFailed(GenerationError):
    """A job that this one waited for can no longer complete."""

    code = "dependency_failed"


class JobCancelled(GenerationError):
    """Somebody cancelled the job that a caller waited for."""

    code = "job_cancelled"


class JobRemoved(GenerationError):
    """The job's record was removed by other means than the API while a reader followed it."""

    code = "job_removed"


class WorkerLost(GenerationError):
    """The processes that ran the job died, time after time, and it seems to be the cause."""

    code = "worker_lost"

    def __init__(self, crashes: int) -> None:
        super().__init__(
            f"the model process died {crashes} times while it worked on this job, each time at the same token, "
            "the last time with no other job beside it; it is not tried again"
        )


class InternalError(GenerationError):
    """A defect of ours, kept from harming other jobs."""

    code = "internal_error"
    retryable = True


KINDS = {
    "InvalidRequest": "invalid_request_error",
    "NotFound": "not_found_error",
    "Conflict": "conflict_error",
    "QueueFull": "rate_limit_error",
    "Unavailable": "unavailable_error",
    "GenerationError": "generation_error",
}


def leaves(root: type[SlotlineError] = SlotlineError) -> list[type[SlotlineError]]:
    """Every class of the tree below `root`, branches too, in the order it is drawn."""
    found: list[type[SlotlineError]] = []
    for child in root.__subclasses__():
        found += [child, *leaves(child)]
    return found


def from_dict(error: dict[str, Any]) -> SlotlineError:
    """Rebuild an error that crossed a process as `to_dict`; an unknown code becomes `InternalError`."""
    message, param = str(error.get("message", "")), error.get("param")
    for cls in leaves():
        if cls.code == error.get("code"):
            # Not by its own constructor, which may make the message from something else.
            found = cls.__new__(cls)
            SlotlineError.__init__(found, message, param)
            return found
    return InternalError(message, param)
