"""A new verb from HTTP to the backend, by the declarations that the server's verbs have, in at most five source files."""

from __future__ import annotations

import ast
import asyncio
import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import httpx2
import pytest
from fastapi import APIRouter, FastAPI

import areal.tinker
from areal.tests.tinker.api.bodies import cross_entropy_json
from areal.tests.tinker.api.stand_in import StandInService, client_of
from areal.tests.unit.tinker.service.fakes import FakeTraining, new_model, serving
from areal.tinker.api import schemas
from areal.tinker.api.app import create_app
from areal.tinker.api.context import ServiceDependency
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.api.routes.queued import InTurnRoute, submit_in_turn
from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.training.engine_backend import EngineBackend
from areal.tinker.service import verbs
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.verbs.forward_backward import ForwardBackward
from areal.tinker.service.verbs.verb import (
    Capabilities,
    ModelRequest,
    RefusedRequest,
    RequestTurn,
    TrainingRequest,
)

# ---- 1. in a module of areal/tinker/service/verbs


@dataclass(frozen=True)
class ScaleGradients(ModelRequest, kind="scale_gradients"):
    """scale_gradients: multiplies the pending gradients of a model by a factor."""

    factor: float = 1.0

    def check(self, model: TrainedModel, server: Capabilities) -> float:
        if self.factor < 0:
            raise UserError(f"factor is {self.factor}: it must be at least 0")
        return self.factor

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        norm = await turn.call(cast(ScalingBackend, turn.backend).scale_gradients, turn.model.id, turn.prepared)
        return {"type": "scale_gradients", "norm": norm}


@dataclass(frozen=True)
class CountModels(ModelRequest, kind="count_models", batched=True):
    """count_models: the number of models of the call that runs the request."""

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[Any]) -> list[Any]:
        return [{"type": "count_models", "models": len(prepared)} for _ in prepared]


# ---- 2. in areal/tinker/api/schemas.py


class ScaleGradientsBody(schemas.SequencedBody):
    """``scale_gradients``."""

    factor: float

    def fields(self) -> dict[str, Any]:
        return {"factor": self.factor}


# ---- 3. in areal/tinker/api/routes/queued.py

router = APIRouter(prefix="/api/v1", route_class=InTurnRoute)


@router.post("/scale_gradients")
async def scale_gradients(body: ScaleGradientsBody, service: ServiceDependency) -> dict[str, Any]:
    """Multiply the pending gradients of a model by a factor."""
    return await submit_in_turn(service, body, ScaleGradients)


@router.post("/count_models")
async def count_models(body: schemas.SequencedBody, service: ServiceDependency) -> dict[str, Any]:
    """Count the models of a call."""
    return await submit_in_turn(service, body, CountModels)


# ---- 4. in areal/tinker/backends/backend.py


class ScalingBackend(TrainingBackend, Protocol):
    """Interface of a backend with the new verb."""

    def scale_gradients(self, model_id: str, factor: float) -> float:
        """Multiply the pending gradients of a model. Returns their norm."""


# ---- 5. in areal/tinker/backends/training/engine_backend.py


class ScalingTraining(FakeTraining):
    """A backend with the new verb."""

    def scale_gradients(self, model_id: str, factor: float) -> float:
        self._enter("scale_gradients", model_id, factor)
        self.models[model_id]["grad"] *= factor
        return float(abs(self.models[model_id]["grad"]))


# ---- the verb


async def result_of(client: httpx2.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and return its result."""
    submitted = (await client.post(f"/api/v1/{route}", json=body)).json()
    return (await client.post("/api/v1/retrieve_future", json={"request_id": submitted["request_id"]})).json()


def test_a_new_verb_runs_in_its_turn_fails_alone_and_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        training = ScalingTraining()
        async with serving(tmp_path, training) as service, client_of(service, router) as client:
            model = await new_model(service)
            own = {"model_id": model}
            # It waits for the request before it. A retry is the same request.
            scale = asyncio.create_task(result_of(client, "scale_gradients", {**own, "seq_id": 2, "factor": 10}))
            again = asyncio.create_task(result_of(client, "scale_gradients", {**own, "seq_id": 2, "factor": 10}))
            await asyncio.sleep(0.05)
            assert not scale.done()
            await result_of(client, "forward_backward", cross_entropy_json(model_id=model, seq_id=1))
            assert await scale == await again == {"type": "scale_gradients", "norm": 5.0}
            # One that is wrong fails in its turn: the body, the content, and a field that the server does not know.
            for seq, wrong in enumerate(({"factor": "x"}, {"factor": -1}, {"factor": 2, "power": 3}), 3):
                answer = await result_of(client, "scale_gradients", {**own, "seq_id": seq, **wrong})
                assert answer["category"] == "user"
                assert next(reversed(wrong)) in answer["error"]
            step = await result_of(client, "optim_step", {**own, "seq_id": 6, "adam_params": {"learning_rate": 1}})
            assert step["type"] == "optim_step"
            assert training.models[model]["weight"] == 5.0
            counts = {(each["kind"], each["result"]): each["count"] for each in (await service.status())["requests"]}
            assert counts["scale_gradients", "done"] == counts["scale_gradients", "refused"] == 1

    asyncio.run(main())


def test_a_new_verb_is_batched_if_it_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        training = ScalingTraining()
        async with serving(tmp_path, training) as service, client_of(service, router) as client:
            session = await service.create_session([])
            models = [await new_model(service, session, number) for number in range(3)]
            # All wait for the step of the first model, which the backend holds back.
            training.gate.clear()
            step = asyncio.create_task(result_of(client, "optim_step", {"model_id": models[0], "seq_id": 1}))
            await asyncio.sleep(0.05)
            numbers = zip(models, (2, 1, 1), strict=True)
            calls = [result_of(client, "count_models", {"model_id": each, "seq_id": seq}) for each, seq in numbers]
            counting = asyncio.gather(*calls)
            await asyncio.sleep(0.05)
            training.gate.set()
            await step
            assert [each["models"] for each in await counting] == [3, 3, 3]

    asyncio.run(main())


# ---- a forgotten place


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (
            {},
            {"run": None},
            r"the verb Half in somewhere has the kind '': name it in its header, in 1 to 32 characters",
        ),
        ({"kind": "x" * 33}, {"run": None}, "has the kind 'x+'"),
        ({"kind": "half"}, {}, r"has no method run, .*\(batched=False\): define it there"),
        ({"kind": "half", "batched": True}, {"run": None}, r"has no method run_batch, .*\(batched=True\)"),
    ],
)
def test_a_declaration_that_lacks_something_names_its_place(
    header: dict[str, Any], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        type("Half", (ModelRequest,), {"__module__": "somewhere", **body}, **header)


def server_verbs() -> list[type[TrainingRequest]]:
    """Return the verbs of the modules in ``areal/tinker/service/verbs``, also of those that nothing imports."""
    modules = [
        importlib.import_module(f"{verbs.__name__}.{each.name}") for each in pkgutil.iter_modules(verbs.__path__)
    ]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    declared = (each for each in found if issubclass(each, TrainingRequest) and each.kind)
    return sorted(declared, key=lambda verb: verb.__name__)


def without_route(app: FastAPI, expected: Sequence[type[TrainingRequest]]) -> list[str]:
    """Return a line for each verb whose kind is not a route."""
    paths = app.openapi()["paths"]
    kinds = [verb.kind for verb in expected if verb is not RefusedRequest and f"/api/v1/{verb.kind}" not in paths]
    return [f"{kind}: declare its route in areal/tinker/api/routes/queued.py" for kind in kinds]


def test_each_verb_has_a_route() -> None:
    app = create_app(cast(Any, StandInService()), ApiSettings())
    assert len(server_verbs()) > 8
    assert without_route(app, server_verbs()) == []
    forgotten = without_route(app, [ForwardBackward, ScaleGradients])
    assert forgotten == ["scale_gradients: declare its route in areal/tinker/api/routes/queued.py"]


def missing_methods(interface: type, backend: type) -> Iterator[str]:
    """Yield a line for each method of an interface that a backend lacks."""
    for name in sorted(name for each in interface.__mro__ for name in vars(each) if not name.startswith("_")):
        if not callable(getattr(backend, name, None)):
            file = "/".join(backend.__module__.split("."))
            yield f"{backend.__name__}.{name}: define it in {file}.py, as {interface.__module__} describes it"


def test_the_backend_has_each_method_of_its_interface() -> None:
    assert list(missing_methods(TrainingBackend, EngineBackend)) == []
    assert list(missing_methods(ScalingBackend, ScalingTraining)) == []
    (forgotten,) = missing_methods(ScalingBackend, EngineBackend)
    assert "EngineBackend.scale_gradients: define it in areal/tinker/backends/training/engine_backend.py" in forgotten


# ---- number of source files


def mentioned(text: str) -> set[str]:
    """Return the names and the words of string constants in a module, without its documentation."""
    tree = ast.parse(text)
    documentation = {each.value for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    names: set[str] = set()
    for each in ast.walk(tree):
        names |= {str(getattr(each, field)) for field in ("id", "attr", "name") if hasattr(each, field)}
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each not in documentation:
            names |= set(re.split(r"\W+", each.value))
    return names


def test_verbs_of_a_model_are_in_five_source_files_at_most() -> None:
    """Passes are in one more, which decodes their protobuf. What calls verbs without a server does not count: it is no part of one."""
    root = Path(areal.tinker.__file__).parent
    served = [path for path in root.rglob("*.py") if path.parent.name != "direct"]
    words = {path.relative_to(root): mentioned(path.read_text()) for path in served}
    counted = [verb for verb in server_verbs() if issubclass(verb, ModelRequest) and verb is not RefusedRequest]
    assert len(counted) > 5
    for verb in counted:
        own = {verb.kind, verb.__name__, f"{verb.__name__}Body"}
        files = sorted(str(path) for path, names in words.items() if names & own)
        assert len(files) <= (6 if issubclass(verb, ForwardBackward) else 5), (verb.kind, files)
