"""Every exchange on record, asked of a running engine and compared: the simulator has to answer in SGLang's shapes.

`tests/contract/golden` was recorded from SGLang. In the real lane SGLang itself is compared with it too, so that a
recording that has become wrong is noticed; RELAX_TEST_RECORD=1 writes it anew instead.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest

from tests.contract import exchanges
from tests.contract.engine_program import Launched
from tests.contract.exchanges import GROUPS, Exchange, ask, compared, differences

RECORD = bool(os.environ.get("RELAX_TEST_RECORD"))
CASES = [pytest.param(group, exchange, id=f"{group}: {exchange}") for group in GROUPS for exchange in GROUPS[group]]
_recorded: dict[str, dict[str, Any]] = defaultdict(dict)


@pytest.mark.parametrize(("group", "exchange"), CASES)
def test_the_answer_has_the_shape_on_record(engine: Launched, group: str, exchange: Exchange) -> None:
    seen = ask(engine, exchange)
    real = engine.spec.program == "sglang"
    if RECORD and real:
        _recorded[group][exchange.name] = seen
        if len(_recorded[group]) == len(GROUPS[group]):
            version = engine.get("/server_info").json()["version"]
            ordered = {entry.name: _recorded[group][entry.name] for entry in GROUPS[group]}
            exchanges.write(group, version, ordered)
        return
    want = exchanges.read(group)[exchange.name]
    found = differences(
        compared(want, exchange.loose), compared(seen, exchange.loose), only_known=exchange.only_known and not real
    )
    assert not found, "\n".join(found)


def test_the_record_holds_these_exchanges_and_no_others() -> None:
    for group, entries in GROUPS.items():
        assert len({entry.name for entry in entries}) == len(entries)
        assert list(exchanges.read(group)) == [entry.name for entry in entries]
