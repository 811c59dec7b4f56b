"""Job ids in addresses."""

from __future__ import annotations

from pydantic import Field

from shared.errors import JobNotFound
from shared.names import JOB_ID
from shared.records import JobRecord
from webapi.describe import Parameters
from webapi.services import services


class JobPath(Parameters):
    """The job an address is about."""

    job_id: str = Field(description="Id of the job.")


def possible_id(path: JobPath) -> str:
    """The id in an address, if a job could have it.

    Raises:
        JobNotFound: none can, so Redis need not be asked.
    """
    if not JOB_ID.fullmatch(path.job_id):
        raise JobNotFound(path.job_id[:128])
    return path.job_id


def stored_job(path: JobPath) -> JobRecord:
    """The record of the job an address is about.

    Raises:
        JobNotFound: there is none.
    """
    return services().store.fetch(possible_id(path))
