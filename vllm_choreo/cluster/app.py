# SPDX-License-Identifier: Apache-2.0
"""`build`: a fleet as an application of Ray Serve, from a file of `serve run` or from a program."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import RequestRouterConfig

from vllm_choreo.cluster.engine import EngineReplica
from vllm_choreo.cluster.ingress import Ingress
from vllm_choreo.cluster.router import PlacedRouter, TenantRouter, key_digest
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from ray.serve import Application

# vLLM queues requests itself; Serve would keep an engine's calls from it.
_MAX_ONGOING = 1_000_000
# Of engines that Serve may add and take away: calls at a time for which there is one more.
_CALLS_PER_ENGINE = 32
# Seconds between two looks at an engine: one that has ended is replaced after three.
_HEALTH_SECONDS = 2.0
# Characters of what a command line is told, from its end.
_SAID = 300
# Seconds that calls may take to their end on an engine that is stopped.
_STOP_SECONDS = 60.0
_OWN_OPTIONS = ("data_parallel_size", "api_server_count", "host", "port", "uds", "headless")


class FleetArgs(BaseModel):
    """Arguments of a fleet.

    Attributes:
        model: folder or name; the same on every node.
        engines: number of engines.
        max_engines: above `engines`: Serve adds engines up to it, by the calls that run.
        ingresses: number of API servers; each has some of the API keys.
        calls_per_engine: calls at a time for which Serve adds an engine.
        upscale_delay_s, downscale_delay_s: seconds for which calls are many, or few, until Serve
            adds an engine, or takes one away.
        num_cpus, num_gpus: share of its node that an engine takes, as Ray counts.
        resources: custom resources of Ray's that an engine takes, by their names.
        env: environment variables of engines and ingresses, besides those of Ray's nodes.
        options: options of `vllm serve`, with underscores.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    engines: int = Field(default=1, ge=1)
    max_engines: int | None = None
    ingresses: int = Field(default=1, ge=1)
    calls_per_engine: float = Field(default=_CALLS_PER_ENGINE, gt=0)
    upscale_delay_s: float = Field(default=30, ge=0)
    downscale_delay_s: float = Field(default=600, ge=0)
    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = {}
    env: dict[str, str] = {}
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> FleetArgs:
        if self.max_engines is not None and self.max_engines < self.engines:
            raise ValueError(
                f"max_engines is {self.max_engines}, and engines {self.engines}: leave max_engines "
                "out, or give at least as many"
            )
        for name in _OWN_OPTIONS:
            if name in self.options:
                raise ValueError(
                    f"options.{name} is Serve's own matter here: leave it out; `engines` says how "
                    "many engines there are, and Serve's http_options where it listens"
                )
        return self


def _key_digests(given: object) -> list[str]:
    """Digests of the API keys of vLLM's command line, or else of its environment."""
    from vllm import envs

    keys = given if isinstance(given, list) else [given or envs.VLLM_API_KEY]
    return [key_digest(str(key)) for key in keys if key]


def build(args: FleetArgs | Mapping[str, Any]) -> Application:
    """Build the application: an ingress in front of engines.

    Args:
        args: arguments of the fleet; of a file, by name.

    Raises:
        UnsupportedOptionError: `vllm serve` does not take its options.
    """
    fleet = FleetArgs.model_validate(args)
    check_options(fleet.model, fleet.options)
    most = fleet.max_engines or fleet.engines
    engines = serve.deployment(EngineReplica).options(
        name="engine",
        **_number_of(fleet, most),
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={
            "num_cpus": fleet.num_cpus,
            "num_gpus": fleet.num_gpus,
            "resources": fleet.resources,
            "runtime_env": {"env_vars": fleet.env},
        },
        request_router_config=RequestRouterConfig(request_router_class=PlacedRouter),
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=_STOP_SECONDS,
        logging_config={"enable_access_log": False},  # ingresses look after each once a second
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=fleet.ingresses,
        max_ongoing_requests=_MAX_ONGOING,
        request_router_config=RequestRouterConfig(
            request_router_class=TenantRouter,
            request_router_kwargs={"keys": _key_digests(fleet.options.get("api_key"))},
        ),
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": fleet.env}},
    )
    handle = engines.bind(fleet.model, fleet.options)
    return ingress.bind(handle, fleet.model, fleet.options, most)


def _number_of(fleet: FleetArgs, most: int) -> dict[str, Any]:
    """Options of Serve's that say how many engines there are."""
    if most == fleet.engines:
        return {"num_replicas": fleet.engines}
    scaling = {
        "min_replicas": fleet.engines,
        "max_replicas": most,
        "target_ongoing_requests": fleet.calls_per_engine,
        "upscale_delay_s": fleet.upscale_delay_s,
        "downscale_delay_s": fleet.downscale_delay_s,
    }
    return {"autoscaling_config": scaling}


def check_options(model: str, options: Mapping[str, object]) -> None:
    """Check options of `vllm serve`, before a replica would end with them.

    Raises:
        UnsupportedOptionError: it does not take them.
    """
    from vllm_choreo.integrations.in_process import parse_options

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parse_options(model, options)
    except SystemExit:
        raise UnsupportedOptionError(
            f"`vllm serve` does not take these options: {said.getvalue().strip()[-_SAID:]}",
            parameter="options",
            value=", ".join(options),
        ) from None
