"""Nothing is lost and nothing comes twice when workers are killed under many streams.

What breaks it is tried where workers start faster: tests/model/worker/test_client_faults.py and test_resumed.py have the mutants.
"""

from dataclasses import replace

from tests.stress.chaos import disturbed
from tests.stress.chaos_cast import Cast, undisturbed


async def test_kills_change_nothing() -> None:
    cast = Cast.tiny(num_streams=20, num_kills=2, most_tokens=40)
    expected = undisturbed(cast)
    run = await disturbed(cast, expected)
    assert run.faults(cast, expected) == []
    assert str(run).startswith("20 streams, 2 left early, 2 read slowly; 3 requests refused\n2 workers killed, at ")
    wrong = replace(run, outcomes=run.outcomes[1:] + run.outcomes[:1], num_counted=run.num_counted - 1, num_used_slots=1)
    assert [fault.split()[-1] for fault in wrong.faults(cast, expected)][-2:] == ["counted", "end"]
    assert "stream 0 differs" in wrong.faults(cast, expected)
