"""One HTTP status for each error of the tree, for the API and for the rows of batches."""

from __future__ import annotations

from shared import errors as tree
from shared.errors import SlotlineError

STATUS: dict[type[SlotlineError], int] = {
    tree.InvalidRequest: 400,
    tree.UnknownModel: 404,
    tree.ContextLengthExceeded: 400,
    tree.InvalidGrammar: 400,
    tree.UnsupportedSchema: 400,
    tree.UnsupportedField: 400,
    tree.UnsupportedCapability: 400,
    tree.ChatTemplateError: 400,
    tree.BodyTooLarge: 413,
    tree.NotFound: 404,
    tree.JobNotFound: 404,
    tree.FileNotFound: 404,
    tree.BatchNotFound: 404,
    tree.Conflict: 409,
    tree.IdConflict: 409,
    tree.JobAlreadyEnded: 409,
    tree.JobNotEnded: 409,
    tree.BatchState: 409,
    tree.QueueFull: 429,
    tree.Unavailable: 503,
    tree.RedisUnavailable: 503,
    tree.StorageUnavailable: 503,
    tree.NoWorker: 503,
    tree.GenerationError: 500,
    tree.GenerationTimeout: 504,
    tree.QueueTimeout: 504,
    tree.GrammarDeadEnd: 422,
    tree.BadLogits: 500,
    tree.DecodeFailed: 500,
    tree.DependencyFailed: 409,
    tree.JobCancelled: 409,
    tree.JobRemoved: 410,
    tree.WorkerLost: 500,
    tree.InternalError: 500,
}
