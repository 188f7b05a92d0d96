"""Probes, keys, origins, models, metrics."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from engine.core.service import EngineState
from engine.core.types import ErrorCode, FinishReason, StepStats, TokenEvent
from server.metrics import ServerMetrics
from server.settings import Settings
from tests.api.harness import chat, completion, in_process, make_app, sample, until
from tests.fake_engine import FakeEngine, emits

LABELS = '{engine="0",model_name="fake"}'


async def test_live_ready_and_healthy_are_apart():
    """The bug: /ready stayed 200 while the engine hung, so that balancers went on sending it requests."""
    engine = FakeEngine(start_gate=(gate := asyncio.Event()))
    async with in_process(engine, waits=False, max_heartbeat_age_s=5) as client:

        async def statuses() -> list[int]:
            return [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")]

        assert await statuses() == [200, 503, 503]
        gate.set()
        while await statuses() != [200, 200, 200]:  # noqa: ASYNC110 (what is waited for has no event to wait on)
            await asyncio.sleep(0)
        engine.heartbeat_age_s = 5.1  # it hangs
        assert await statuses() == [200, 503, 503]
        reason = "the engine has sent no heartbeat for 5.1 s"
        report = {"status": "silent", "state": "ready", "heartbeat_age_s": 5.1, "restarts": 0, "reason": reason}
        assert (await client.get("/health")).json() == report
        engine.state, engine.heartbeat_age_s, engine.start_error = EngineState.RESTARTING, None, "no weights in /secret"
        assert await statuses() == [200, 503, 503]
        assert (await client.get("/ready")).json()["reason"] == "the engine is restarting: no weights in /secret"
        assert (await client.get("/health")).json()["reason"] == "the engine is restarting", "it needs no key"
        engine.state, engine.heartbeat_age_s = EngineState.READY, 0.0
        assert (await client.get("/health")).json()["reason"] is None


@pytest.mark.parametrize("fails_while", ["starting", "serving"])
async def test_permanent_engine_failure_is_reported_once(fails_while: str):
    reasons: list[str] = []
    engine = FakeEngine(start_error="no weights" if fails_while == "starting" else None)
    app = make_app(engine)
    app.state.runtime._on_fatal = reasons.append
    async with app.router.lifespan_context(app):
        if fails_while == "serving":
            await until(lambda: app.state.runtime.is_ready)
            engine.start_error, engine.state = "no weights", EngineState.FAILED
        await until(lambda: reasons)
    assert reasons == ["no weights"]
    assert app.state.runtime.fatal == "no weights"


async def test_keys_open_everything_but_liveness():
    keys = (SecretStr("one"), SecretStr("two"))
    async with in_process(FakeEngine(), api_keys=keys, docs=False) as client:
        for path in ("/live", "/health"):
            assert (await client.get(path)).status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/ready",
            "/version",
            "/load",
            "/v1/loads",
            "/tokenizer_info",
            "/docs",
            "/openapi.json",
            "/nowhere",
        ):
            refused = await client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        for header, status in [("Bearer one", 200), ("bearer two", 200), ("Bearer three", 401), ("Basic one", 401), ("one", 401)]:
            assert (await client.get("/v1/models", headers={"Authorization": header})).status_code == status
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            assert (await client.post(path, content=b"x" * 10)).status_code == 401


async def test_origins_are_let_in_only_where_set():
    headers = {"Origin": "https://page.test", "Access-Control-Request-Method": "POST"}
    async with in_process(FakeEngine(), cors_origins=("https://page.test",), api_keys=(SecretStr("k"),)) as client:
        response = await client.options("/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://page.test"
        exposed = (await client.get("/live", headers=headers)).headers["access-control-expose-headers"].lower()
        assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed.split(", "))
    async with in_process(FakeEngine()) as client:
        refused = await client.get("/live", headers=headers)
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers


async def test_the_model_is_listed():
    async with in_process(FakeEngine()) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 256)
        assert (await client.get("/v1/models/fake")).json() == card
        assert (await client.get("/version")).json()["version"]


DASHBOARD = [
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_max_num_generation_tokens_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "num_preemptions_total",
    "request_params_n_count",
    "request_params_max_tokens_count",
    "iteration_tokens_total_count",
]


async def test_metrics_of_served_requests():
    async with in_process(FakeEngine(script=emits([5] * 9), chunks=(1, 4))) as client:
        await client.post("/v1/completions", json=completion(n=2, max_tokens=9))
        await client.post("/v1/chat/completions", json=chat(max_tokens=9, stream=True))
        await client.post("/v1/completions", json=completion(n=0))
        await client.get("/nowhere")
        samples = await sample(client)
    assert [name for name in DASHBOARD if f"vllm:{name}{LABELS}" not in samples] == []
    assert samples[f"vllm:generation_tokens_total{LABELS}"] == 27
    assert samples['vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"}'] == 3
    assert samples[f"vllm:time_to_first_token_seconds_count{LABELS}"] == 3
    assert samples[f"vllm:inter_token_latency_seconds_count{LABELS}"] == 3 * 3
    assert samples[f"vllm:spec_decode_num_drafts_total{LABELS}"] == 3 * 3
    assert samples['vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="fake",position="2"}'] == 3
    assert samples[f"vllm:request_max_num_generation_tokens_count{LABELS}"] == 2
    assert samples[f"latebranch_step_tokens_sum{LABELS}"] == 3 * 8
    assert samples[f"latebranch_step_tokens_count{LABELS}"] == 3 * 3
    assert samples['latebranch_expansions_total{engine="0",expansion="4.1.0",model_name="fake"}'] == 3
    assert samples['latebranch_engine_state{engine="0",model_name="fake",state="ready"}'] == 1
    assert samples['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 1
    assert samples['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    assert samples['http_requests_total{handler="none",method="GET",status="4xx"}'] == 1


@pytest.mark.parametrize("prefix_cache", ["key", "off"])
async def test_cache_size_is_reported_in_blocks(prefix_cache: str):
    """The bug: blocks of one token were reported, so that gateways looked for prefixes in other blocks than the engine."""
    async with in_process(FakeEngine(), prefix_cache=prefix_cache) as client:
        (info,) = [name for name in await sample(client) if name.startswith("vllm:cache_config_info{")]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", str(4096 // 16))
    assert labels["enable_prefix_caching"] == str(prefix_cache != "off")
    assert Settings(model="m", prefix_cache="all").to_engine_config().scheduler.prefix_block_tokens == 16


async def test_load_counts_requests_in_progress():
    engine = FakeEngine(gate=(gate := asyncio.Event()))

    async def load() -> int:
        return int((await client.get("/load")).json()["server_load"])

    async with in_process(engine) as client:
        assert await load() == 0
        pending = [
            asyncio.create_task(client.post("/v1/completions", json=completion(stream=stream))) for stream in (True, False)
        ]
        await until(lambda: len(engine.living) == 2)
        assert await load() == 2
        gate.set()
        await asyncio.gather(*pending)
        assert (await client.post("/v1/completions", json=completion(n=0))).status_code == 400
        assert await load() == 0


def _kinds(value: Any) -> set[type]:
    """Return the types of all values in a JSON document."""
    if isinstance(value, dict | list):
        return set().union(*map(_kinds, value.values() if isinstance(value, dict) else value))
    return {type(value)}


async def test_loads_has_the_form_gateways_read():
    """smg drops a report whose timestamp is a number, whose counts are floats, or that has a null or no loads."""
    async with in_process(FakeEngine(script=emits([5] * 9), chunks=(1, 4))) as client:
        for _ in range(2):  # before the first step, and after a request
            report = (await client.get("/v1/loads", params={"include": "core,disagg,queues,memory"})).json()
            assert isinstance(report["timestamp"], str)
            (load,) = report["loads"]
            assert {name for name, value in load.items() if type(value) is not int} == {"token_usage"}
            assert type(load["token_usage"]) is float
            assert _kinds(report) == {str, int, float}
            await client.post("/v1/completions", json=completion(n=2, max_tokens=9))


async def test_refused_requests_are_counted_only_as_refused():
    """The bug: the samples of a refused request were counted as aborted, with latencies."""
    async with in_process(FakeEngine(max_living=2)) as client:
        assert (await client.post("/v1/completions", json=completion(n=3))).status_code == 503
        samples = await sample(client)
    assert samples['latebranch_rejected_requests_total{engine="0",model_name="fake",reason="engine_busy"}'] == 1
    ours = [name for name in samples if name.startswith(("vllm:request_", "vllm:e2e_request_"))]
    assert [name for name in ours if samples[name]] == []


async def test_siblings_of_failed_sample_count_as_failed():
    """The bug: one failing sample of three counted one error and two aborts, as if clients had left."""
    async with in_process(FakeEngine(fail_after=1)) as client:
        assert (await client.post("/v1/completions", json=completion(n=3))).status_code == 500
        samples = await sample(client)
    ends = {
        reason: samples[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="fake"}}']
        for reason in FinishReason
    }
    assert (ends[FinishReason.ERROR], ends[FinishReason.ABORT]) == (3, 0)


async def test_failed_submission_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch):
    """The bug: only EngineErrors were expected of `submit`."""
    engine = FakeEngine()

    def overflows(requests):
        raise OverflowError("an integer beyond 64 bits")

    monkeypatch.setattr(engine, "submit", overflows)
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=completion(n=2))).status_code == 500
        samples = await sample(client)
    assert engine.living == {}
    assert samples['latebranch_rejected_requests_total{engine="0",model_name="fake",reason="engine_error"}'] == 1


async def test_load_of_dead_engine_is_zero():
    """The bug: running, waiting and cache use kept the values of the worker's last step for as long as it was dead."""
    engine = FakeEngine()
    async with in_process(engine) as client:
        await client.post("/v1/completions", json=completion())

        async def load() -> list[float]:
            samples = await sample(client)
            return [samples[f"vllm:{name}{LABELS}"] for name in ("num_requests_running", "kv_cache_usage_perc")]

        assert await load() == [1.0, 64 / 4096]
        engine.state = EngineState.RESTARTING
        assert await load() == [0.0, 0.0]
        engine.state, engine.num_restarts = EngineState.READY, 1
        assert await load() == [0.0, 0.0], "the new worker has taken no step yet"


def test_the_phases_of_a_request_add_up():
    """The engine's report of its queue splits the wait into queue and prefill."""
    now = [0.0]
    metrics = ServerMetrics("m", 100, lambda: FakeEngine().health)
    sample_meter = metrics.requests.meter(1, 9, lambda: now[0]).sample(7)
    for at_s, event in [(5.0, TokenEvent("r", (1,), queued_s=2.0)), (6.0, TokenEvent("r", (1, 2, 3, 4)))]:
        now[0] = at_s
        sample_meter.on_event(event)
        sample_meter.keep(len(event.token_ids))
    now[0] = 7.0
    sample_meter.end(FinishReason.STOP)
    sample_meter.end(FinishReason.ABORT)
    lines = metrics.render().decode().splitlines()
    sums = {line.split("{")[0].removesuffix("_sum"): float(line.split()[-1]) for line in lines if "_sum{" in line}
    assert sums["vllm:request_queue_time_seconds"] == 2.0
    assert sums["vllm:request_prefill_time_seconds"] == 3.0
    assert sums["vllm:request_decode_time_seconds"] == 1.0
    assert sums["vllm:request_inference_time_seconds"] == 4.0
    assert sums["vllm:request_time_per_output_token_seconds"] == 0.25
    assert sums["vllm:e2e_request_latency_seconds"] == 7.0
    assert not any('finished_reason="abort"' in line and line.endswith(" 1.0") for line in lines)


def test_delayed_steps_are_timed_as_they_ran():
    now = [0.0]
    metrics = ServerMetrics("m", 100, lambda: FakeEngine().health)
    sample_meter = metrics.requests.meter(1, 9, lambda: now[0]).sample(7)
    events = [TokenEvent("r", (1,)), TokenEvent("r", (1, 2, 3, 4), num_steps=4, delayed_s=0.5), TokenEvent("r", (5,))]
    for at_s, event in zip([5.0, 6.5, 6.5], events, strict=True):
        now[0] = at_s
        sample_meter.on_event(event)
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("vllm:inter_token_latency_seconds")]
    values = {line.split("{")[0].removeprefix("vllm:inter_token_latency_seconds_"): float(line.split()[-1]) for line in lines}
    assert (values["sum"], values["count"]) == (1.5, 5.0)
    assert [float(line.split()[-1]) for line in lines if 'le="0.3"' in line] == [4.0], "four steps of .25 s each"


def test_no_latency_is_negative():
    now = [5.0]
    metrics = ServerMetrics("m", 100, lambda: FakeEngine().health)
    sample_meter = metrics.requests.meter(1, 9, lambda: now[0]).sample(7)
    for event in (TokenEvent("r", (1,)), TokenEvent("r", (2,), delayed_s=0.5)):  # the first one was read late
        sample_meter.on_event(event)
    sums = [line for line in metrics.render().decode().splitlines() if line.startswith("vllm:inter_token_latency_seconds_sum")]
    assert float(sums[0].split()[-1]) == 0.0


async def test_clients_cannot_make_new_series():
    async with in_process(FakeEngine()) as client:
        for number in range(80):
            await client.request(f"M{number}", f"/path-{number}")
        names = await sample(client)
    assert len([name for name in names if name.startswith("http_requests_total")]) == 1
    metrics = ServerMetrics("m", 10, lambda: FakeEngine().health)
    for trunk in range(200):
        metrics.steps.on_step(StepStats(1, 1, 0, 0, 1, expansions={f"{trunk}.1.0": 1}))
    expansions = [line for line in metrics.render().decode().splitlines() if line.startswith("latebranch_expansions_total{")]
    assert len(expansions) == 65
    assert sum("other" in line for line in expansions) == 1


def test_metrics_compare_expected_with_realised_tokens():
    metrics = ServerMetrics("m", 10, lambda: FakeEngine().health)
    for step in (1, 2):
        metrics.steps.on_step(StepStats(step, 1, 0, 0, 1, num_expected_rows=2, expected_tokens=3.25, num_realised_tokens=4))
    metrics.steps.on_step(StepStats(3, 1, 0, 0, 1, num_decoding_rows=1))
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("latebranch_")]
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    names = ("expected_tokens", "expected_rows", "realised_tokens")
    assert [values[f"latebranch_{name}_total"] for name in names] == [6.5, 4.0, 8.0]


def test_metrics_compare_predicted_with_actual_seconds():
    metrics = ServerMetrics("m", 10, lambda: FakeEngine().health)
    for step in (1, 2):
        stats = StepStats(
            step, 1, 0, 0, 1, policy_reason="probe", predicted_s=0.25, predicted_speedup=2.0, step_s=0.5, policy_s=0.01
        )
        metrics.steps.on_step(stats)
    metrics.steps.on_step(StepStats(3, 1, 0, 0, 1, policy_reason="fixed", step_s=0.5))
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("latebranch_")]
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    names = ("predicted_seconds", "foretold_seconds", "predicted_plain_seconds")
    assert [values[f"latebranch_{name}_total"] for name in names] == [0.5, 0.98, 1.0]
    reasons = {line.split('reason="')[1].split('"')[0]: line.split()[-1] for line in lines if "policy_steps_total" in line}
    assert reasons == {"probe": "2.0", "fixed": "1.0"}


async def test_every_metric_is_documented():
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    async with in_process(FakeEngine(), lora=("one=folder",)) as client:
        text = (await client.get("/metrics")).text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    ours = [name for name in families if name.startswith(("vllm:", "latebranch_", "http_"))]
    assert sorted(ours) == sorted(re.findall(r"^\| `([a-z0-9_:]+)` \|", documented, re.MULTILINE))


@pytest.mark.parametrize(("code", "num_corrupted"), [(ErrorCode.LOGITS_NOT_FINITE, 1), (ErrorCode.WORKER_CRASHED, 0)])
async def test_failure_code_is_returned_and_counted(code: ErrorCode, num_corrupted: int):
    async with in_process(FakeEngine(fail_after=0, fail_code=code)) as client:
        response = await client.post("/v1/completions", json=completion(max_tokens=4))
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "the step failed",
            "type": "server_error",
            "param": None,
            "code": code.value,
        }
        samples = await sample(client)
        assert samples[f'latebranch_failed_requests_total{{code="{code}",engine="0",model_name="fake"}}'] == 1
        assert samples[f"vllm:corrupted_requests_total{LABELS}"] == num_corrupted
        assert samples[f"latebranch_resumed_requests_total{LABELS}"] == 0


async def test_no_created_series_are_exported():
    """The bug: every counter and histogram had a `_created` series beside it, a third of all."""
    async with in_process(FakeEngine()) as client:
        await client.post("/v1/completions", json=completion())
        text = (await client.get("/metrics")).text
        document = (await client.get("/openapi.json")).json()
    assert "latebranch_key_tokens_total" in text
    assert "_created" not in text
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}, "JSON was declared too"
