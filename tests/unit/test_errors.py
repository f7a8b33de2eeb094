"""The exception tree is complete: everything that can be raised knows its exit code, its HTTP status and its name."""

from __future__ import annotations

import json
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import pytest

import relax_slurm
import sidecars
from relax_slurm import errors
from relax_slurm.errors import BindingMismatch, RelaxError, RequestError, Unavailable
from relax_slurm.forward.reader import Refusal as BadFraming

EXIT_CODES = set(range(1, 10))
"""Of the contract; 130 and 143 belong to signals."""


def load_all() -> None:
    """Import every shipped module, so that every subclass exists. Programs are not run by that."""
    for package in (relax_slurm, sidecars):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                import_module(found.name)


def tree(root: type[RelaxError]) -> Iterator[type[RelaxError]]:
    """A class and all below it that are shipped."""
    if root.__module__.partition(".")[0] in {"relax_slurm", "sidecars"}:
        yield root
    for child in root.__subclasses__():
        yield from tree(child)


load_all()
CLASSES = sorted(set(tree(RelaxError)) - {BadFraming}, key=lambda each: each.__qualname__)
"""All but the one whose status and code belong to the object (see the last test)."""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_complete(kind: type[RelaxError]) -> None:
    assert kind.exit_code in EXIT_CODES
    assert 400 <= kind.http_status < 600
    assert re.fullmatch(r"[a-z][a-z0-9_]*", kind.code)
    assert kind.__doc__
    assert kind.__doc__ != RelaxError.__doc__ or kind is RelaxError
    assert kind.retry_after is None or kind.http_status == 503


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_can_be_answered(kind: type[RelaxError]) -> None:
    error = kind.__new__(kind)
    RelaxError.__init__(error, "node n1: seen 3 GPUs, wanted 4", detail={"node": "n1"})
    body = json.loads(json.dumps(error.as_json()))
    assert body == {
        "message": "node n1: seen 3 GPUs, wanted 4",
        "type": "invalid_request_error" if kind.http_status < 500 else "server_error",
        "code": kind.code,
        "detail": {"node": "n1"},
    }
    assert str(error) == "node n1: seen 3 GPUs, wanted 4"


def test_codes_are_unique() -> None:
    # A class without a code of its own is a case of its parent's; two classes may not claim the same one.
    # HTTP answers and control messages are two vocabularies: "forbidden" means the same in both.
    own = [kind for kind in CLASSES if "code" in vars(kind) and kind is not RelaxError]
    counts = Counter((issubclass(kind, RequestError), kind.code) for kind in own)
    assert not {code for (_, code), count in counts.items() if count > 1}


def test_a_message_alone_has_no_detail() -> None:
    assert Unavailable("later").as_json() == {"message": "later", "type": "server_error", "code": "unavailable"}


def test_a_binding_mismatch_carries_its_table() -> None:
    rows = [{"node": "n1", "gpu": "3", "seen": "none", "wanted": "index 3", "problem": "missing"}]
    error = BindingMismatch("refused", rows=rows)
    assert error.rows == rows
    assert error.as_json()["detail"] == {"rows": rows}


def test_the_roots_cover_the_contract() -> None:
    direct = {kind.exit_code: kind for kind in RelaxError.__subclasses__() if kind.__module__ == errors.__name__}
    assert direct.keys() >= EXIT_CODES
    answered = {kind.http_status for kind in tree(RequestError)} - {500}
    assert answered >= {400, 401, 403, 404, 405, 413, 502, 503, 504}


def test_the_drawing_names_every_class() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    defined = {kind.__name__ for kind in CLASSES if kind.__module__ == errors.__name__} - {"RelaxError"}
    assert drawn == defined


def test_a_request_that_is_no_http_has_a_status_of_its_own() -> None:
    error = BadFraming(431, "headers_too_large", "request: the headers are over 9 bytes")
    assert error.status == 431
    assert error.as_json()["code"] == "headers_too_large"
