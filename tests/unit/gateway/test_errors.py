"""Every error that can be answered over HTTP is answered as the tree says."""

from __future__ import annotations

from relax_slurm import errors
from relax_slurm.core.discovery import DiscoveryInvalid
from relax_slurm.core.plan import Role
from tests.unit.gateway.stage import Stage, run

MAP = {
    errors.BadRequest: (400, "bad_request", None),
    errors.Unauthorized: (401, "unauthorized", None),
    errors.Forbidden: (403, "forbidden", None),
    errors.NotFound: (404, "not_found", None),
    errors.MethodNotAllowed: (405, "method_not_allowed", None),
    errors.BodyTooLarge: (413, "body_too_large", None),
    errors.UpstreamFailed: (502, "upstream_failed", None),
    errors.Unavailable: (503, "unavailable", "1"),
    errors.DeadlineExceeded: (504, "deadline", None),
    DiscoveryInvalid: (503, "discovery_invalid", "1"),
    errors.NotBuilt: (501, "not_built", None),
}


def test_the_map_is_complete() -> None:
    named = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)}
    assert named - {errors.RequestError} <= set(MAP)


def test_each_error_is_answered_as_the_tree_says() -> None:
    async def body(stage: Stage) -> None:
        for kind, (status, code, retry) in MAP.items():

            def fail(look: int, kind: type[errors.RelaxError] = kind) -> None:
                raise kind("one sentence")

            stage.source.before_look = fail
            for role in Role:
                answer = await stage.client.post(f"/{role}/generate", json={"text": "x"})
                assert answer.status_code == status
                assert answer.headers.get("retry-after") == retry
                assert answer.headers["content-type"] == "application/json"
                error = answer.json()["error"]
                assert (error["message"], error["code"]) == ("one sentence", code)
                assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
        assert stage.engine.requests == []

    run(body)


def test_a_defect_is_a_500_that_tells_nothing() -> None:
    async def body(stage: Stage) -> None:
        def fail(look: int) -> None:
            raise ZeroDivisionError("inner detail")

        stage.source.before_look = fail
        answer = await stage.client.post("/rollout/generate", json={"text": "x"})
        assert answer.status_code == 500
        assert "inner detail" not in answer.text
        stage.source.before_look = lambda look: None
        assert (await stage.client.post("/rollout/generate", json={"text": "x"})).status_code == 200

    run(body)
