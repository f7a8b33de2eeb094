"""The command line, the environment and the ports of a router."""

from __future__ import annotations

import itertools
import socket
import sys
from pathlib import Path

import pytest

from relax_slurm.config.models import RouterConfig
from relax_slurm.control.router_program import RouterProgram, is_free, url_of
from relax_slurm.core.plan import Role
from relax_slurm.errors import StartupFailed
from tests.unit.control.router_stage import KEY, program
from tests.unit.control.stage import config_of, plan_of, run


def test_nothing_is_repeated_no_key_is_shown_and_every_port_is_named(tmp_path: Path) -> None:
    settings = RouterConfig(policy="manual", extra_args=("--max-idle-secs=60",))
    words = program(tmp_path, settings=settings).arguments(1234, 1235)
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(words)
    options = dict(itertools.pairwise(words))
    assert options["--port"] == "1234"
    assert options["--prometheus-port"] == "1235"
    assert options["--policy"] == "manual"
    assert options["--request-timeout-secs"] == "13"
    assert options["--max-payload-size"] == str(1 << 20)
    assert words[-1] == "--max-idle-secs=60"
    assert KEY not in " ".join(words)
    assert "--pd-disaggregation" not in words
    assert "--pd-disaggregation" in program(tmp_path, disaggregated=True).arguments(1, 2)


def test_the_key_is_in_the_environment_and_proxies_are_not(tmp_path: Path) -> None:
    made = program(tmp_path)
    env = made.environment({"HTTPS_PROXY": "http://p", "no_proxy": "x", "PATH": "/bin", "RELAX_PARENT_PID": "1"})
    assert env["RELAX_ROUTER_KEY"] == KEY
    assert env["PATH"] == "/bin"
    assert not {"HTTPS_PROXY", "no_proxy", "RELAX_PARENT_PID"} & env.keys()
    assert KEY not in repr(made)


def test_a_port_that_is_taken_or_promised_is_left_out(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port, lingering=True)
        with pytest.raises(StartupFailed, match=f"no free port on 127.0.0.1 .*{port}-{port}"):
            program(tmp_path, ports=(port,)).choose_ports(())
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    made = program(tmp_path, ports=ports)
    assert sorted(made.choose_ports(())) == sorted(ports)
    with pytest.raises(StartupFailed):
        made.choose_ports({ports[0]})


def test_without_the_interpreter_the_error_says_what_to_install(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(StartupFailed, match=r"pip install 'sglang-router.*engine\.router_python"):
            await program(tmp_path).start(1, 2)

    run(scenario)


def test_the_program_of_a_model(tmp_path: Path) -> None:
    roles = {
        "rollout": {
            "pool": "p",
            "models": {
                "m": {
                    "model_path": "sim/m",
                    "gpus": 4,
                    "route_mode": "SGLANG_ROUTER",
                    "router": {"policy": "round_robin"},
                }
            },
        }
    }
    config = config_of(roles=roles)
    model = plan_of(config).model_placement(Role.ROLLOUT, "m")
    made = RouterProgram.of(model, config, host="::1", ports=[5, 4], logs=tmp_path, key=KEY)
    assert (made.python, made.settings.policy, made.disaggregated) == (sys.executable, "round_robin", False)
    assert made.log == tmp_path / "head_router_m.log"
    assert url_of("::1", 5) == "http://[::1]:5"
    assert url_of("node", 5) == "http://node:5"


def test_metrics_do_not_go_where_ended_connections_linger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = server.accept()
            served.close()  # the side that ends it first remembers it
            assert client.recv(1) == b""
    assert is_free("127.0.0.1", port, lingering=True)
    assert not is_free("127.0.0.1", port, lingering=False)
