"""Nothing is lost and nothing comes twice when workers are killed under many streams.

What breaks it is tried where workers start faster: tests/model/test_client_faults.py and test_resumed.py have the mutants.
"""

from tests.e2e.chaos import chaos_request, killed, undisturbed


async def test_kills_change_nothing() -> None:
    requests = [chaos_request(number) for number in range(40)]
    outcomes, num_restarts = await killed(requests, num_kills=3)
    assert outcomes == undisturbed(requests)
    assert num_restarts == 3
