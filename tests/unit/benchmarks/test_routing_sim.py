"""The simulation of routers: measured speeds, traffic, caches, and that knowledge which changes nothing wins nothing."""

from benchmarks.routing_sim import Job, Replica, Speeds, Traffic, compared, drawn_jobs, measured_speeds

ONE_SPEED = Speeds({"a": dict.fromkeys(("code", "maths", "prose", "summary"), 2.0)}, repeating=2.0, missing=2.0)


def test_speeds_are_the_recorded_ones():
    speeds = measured_speeds("0")
    assert speeds.by_kind["head+ngram"]["code"] == 1.87
    assert (speeds.repeating, speeds.missing) == (2.43, 1.23)


def test_equal_speeds_give_equal_routes():
    assert compared(Traffic(400, 0.3), ONE_SPEED, ("a",) * 4) == (1.0, 1.0)


def test_known_specialities_shorten_the_service():
    """Each drafter is fast on what the other is slow on: only a router that knows them serves each text fast."""
    kinds = ONE_SPEED.by_kind["a"]
    one, other = ({kind: 3.0 if (kind in ("code", "maths")) == is_one else 1.0 for kind in kinds} for is_one in (True, False))
    _, busier = compared(Traffic(1000, 0.0), Speeds({"one": one, "other": other}, 2.0, 2.0), ("one", "other"))
    assert busier > 1.2


def test_traffic_is_drawn_by_its_seed():
    jobs = drawn_jobs(Traffic(500, 0.3), 2)
    assert jobs == drawn_jobs(Traffic(500, 0.3), 2) != drawn_jobs(Traffic(500, 0.3, seed=1), 2)
    assert not any(job.repeats is not None for job in drawn_jobs(Traffic(500, 0.0), 2))
    for number, job in enumerate(jobs):
        if job.repeats is not None:
            assert job.repeats < number
            assert (jobs[job.repeats].user, jobs[job.repeats].num_answer) == (job.user, job.num_answer)
            assert job.num_history == 0


def test_replica_caches_conversations_and_answers():
    replica = Replica("a")
    first = Job(1, 0, "code", 0, 100, 1.0, None)
    replica.serve(0, first)
    follow_up = Job(1, 0, "code", 160, 100, 1.0, None)
    assert replica.prompt_tokens(follow_up) == 60
    assert replica.prompt_tokens(Job(2, 5, "code", 160, 100, 1.0, None)) == 220
    assert replica.has_text(Job(1, 1, "code", 0, 100, 1.0, repeats=0))
    assert not replica.has_text(Job(2, 1, "code", 0, 100, 1.0, repeats=0))
    for number in range(1, 400):
        replica.serve(number, Job(1, number, "code", 0, 100, 1.0, None))
    assert replica.prompt_tokens(follow_up) == 220, "evicted"
    assert not replica.has_text(Job(1, 1, "code", 0, 100, 1.0, repeats=0))
