"""Names in Redis: our keys, the RQ queues we use, and the function an RQ job must name.

Everything of ours begins with `slotline:`; everything of RQ's keeps RQ's own names.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from rq.serializers import JSONSerializer

#: The function of a generation job. It exists so that a plain RQ worker fails with a clear message.
JOB_FUNCTION = "slotline.generate"

#: The one serializer on the queue. Never pickle: whoever can write to Redis could then run code.
SERIALIZER = JSONSerializer

Priority = Literal["interactive", "normal", "batch"]
#: Most urgent first: the order in which a worker pulls.
PRIORITIES: tuple[Priority, ...] = get_args(Priority)

DEFAULT_MODEL = "default"
DEFAULT_TENANT = "default"

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,127}")
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")

DEADLINES = "slotline:deadlines"  # zset: id of each job that may wait only so long, by the second to look at it
JOBS_INDEX = "slotline:jobs"  # zset: job id by creation time in ms
MODELS = "slotline:models"  # zset: model name by the time it was first served
KNOWN_RUN = "slotline:run"  # string: run id of the server process in which workers have registered what they hold
SETTLING = "slotline:settling"  # set: workers that have yet to do so in a new one; nothing is pulled while it is there
REPLICATED = "slotline:replicated"  # string: written before each wait for replicas, so that it is for all before it
RQ_QUEUES = "rq:queues"  # set: key of every queue that RQ knows
WORKERS = "slotline:workers"  # set: names of workers that may hold jobs


def queue_name(model: str, priority: str, tenant: str = DEFAULT_TENANT) -> str:
    """The RQ queue of one model, priority and tenant."""
    return f"{model}:{priority}:{tenant}"


def split_queue_name(name: str) -> tuple[str, str]:
    """Model and priority of a queue; a queue that is not named by our rule counts as `normal`."""
    parts = name.split(":")
    if len(parts) == 3 and parts[1] in PRIORITIES:
        return parts[0], parts[1]
    return name, "normal"


def rq_queue_key(name: str) -> str:
    """The Redis list of an RQ queue."""
    return f"rq:queue:{name}"


def name_of_rq_queue(key: str) -> str:
    """The RQ queue that is in the Redis list `key`."""
    return key.removeprefix("rq:queue:")


def job_key(job_id: str) -> str:
    """The hash of an RQ job. Our own fields in it begin with `sl_`."""
    return f"rq:job:{job_id}"


def events_key(job_id: str) -> str:
    """The event log of a job (a Redis stream) and, under the same name, its pub/sub channel."""
    return f"slotline:events:{job_id}"


def model_key(model: str) -> str:
    """The hash that describes a model (`shared/registry.py`)."""
    return f"slotline:model:{model}"


def live_queues_key(model: str) -> str:
    """The set of RQ queue names a model's jobs have ever used."""
    return f"slotline:queues:{model}"


def doorbell_key(model: str, priority: str) -> str:
    """The list that workers with room for jobs of this kind block on; it holds one entry if some may wait."""
    return f"slotline:doorbell:{model}:{priority}"


def free_key(model: str) -> str:
    """A zset: workers of the model that have a free slot, each by the ms until which that may be relied on."""
    return f"slotline:free:{model}"


def wake_key(worker: str) -> str:
    """The list that ends a worker's wait at its doorbells, since it has room for others now."""
    return f"slotline:wake:{worker}"


def idempotency_key(digest: str) -> str:
    """The string that maps an `Idempotency-Key` to its job."""
    return f"slotline:idempotency:{digest}"


def held_key(worker: str) -> str:
    """The list of job ids a worker has pulled and not yet ended or handed back."""
    return f"slotline:held:{worker}"


def lease_key(worker: str) -> str:
    """A string that lives only while its worker renews it."""
    return f"slotline:lease:{worker}"


def stats_key(worker: str) -> str:
    """A live worker's figures as JSON, gone a few seconds after the worker."""
    return f"slotline:stats:{worker}"


def ask_key(model: str) -> str:
    """The list of questions to the workers of a model."""
    return f"slotline:ask:{model}"


def answer_key(question_id: str) -> str:
    """The list that the answer to one question is pushed to."""
    return f"slotline:answer:{question_id}"


def web_lease_key(web: str) -> str:
    """A string that lives only while the web process `web` renews it; its bound jobs end without it."""
    return f"slotline:web:{web}:lease"


FILES = "slotline:files"  # zset: file id by creation time in ms
BATCHES = "slotline:batches"  # zset: batch id by creation time in ms
OPEN_BATCHES = "slotline:batches:open"  # set: ids of batches that somebody has work with
BATCH_PROCESSES = "slotline:batches:processes"  # zset: processes that run batches by the second they last said so


def file_key(file_id: str) -> str:
    """The hash of a file's object."""
    return f"slotline:file:{file_id}"


def batch_key(batch_id: str) -> str:
    """The hash of a batch."""
    return f"slotline:batch:{batch_id}"


def feed_key(name: str) -> str:
    """The list of ids of jobs that ended, of those that were submitted with `notify`."""
    return f"slotline:feed:{name}"


FILE_EXPIRY = "slotline:files:expiry"  # zset: file id by the second it expires
TRASH = "slotline:files:trash"  # zset: object in the storage by the second from which it may be deleted


def file_parts_key(file_id: str) -> str:
    """The list of a batch's output or error file's parts, each as JSON."""
    return f"slotline:file:{file_id}:parts"


def file_users_key(file_id: str) -> str:
    """The set of open batches that a file is the input or a result of."""
    return f"slotline:file:{file_id}:batches"


WEBHOOKS = "slotline:webhooks"  # zset: id of each webhook not yet delivered by the ms at which it is due


def webhook_key(webhook_id: str) -> str:
    """The hash of a webhook that is not yet delivered."""
    return f"slotline:webhook:{webhook_id}"


def batch_lease_key(batch_id: str) -> str:
    """A string, the owner's name, that lives only while the owner of a batch renews it."""
    return f"slotline:batch:{batch_id}:lease"


def batch_done_key(batch_id: str) -> str:
    """A bitmap by line number: lines of a batch that have a row in the results."""
    return f"slotline:batch:{batch_id}:done"


def batch_failed_key(batch_id: str) -> str:
    """A bitmap by line number: lines of a batch whose row is in the error file."""
    return f"slotline:batch:{batch_id}:failed"
