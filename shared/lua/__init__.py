"""The scripts that run inside Redis, each in a file of its own beside this one.

A line `-- uses NAME` in a script stands for the functions in the file NAME, which is no script by itself.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import redis
from redis.commands.core import Script


@cache
def source(name: str) -> str:
    """The text of a script."""
    text = files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
    return re.sub(r"^-- uses (\w+)\n", lambda found: source(found[1]), text, flags=re.MULTILINE)


def script(client: redis.Redis, name: str) -> Script:
    """A script bound to a client; it loads itself again where Redis has forgotten it (NOSCRIPT)."""
    return client.register_script(source(name))
